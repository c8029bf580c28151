"""Recipes from TOML and overrides: what is read, what is refused, and in which words."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo import recipe as recipe_module
from gspo.config import (
    AlgorithmConfig,
    ColdStartConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
)
from gspo.errors import ConfigError
from gspo.recipe import check_sizes, dump_recipe, load_recipe, packaged_recipes, parse_overrides
from gspo.recipe_names import ALIASES, annotation_of, explain_unknown, option_names


def refusal(source, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(source, overrides)
    return str(caught.value)


def write(folder: Path, text: str, name: str = "my.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- reading


def test_a_toml_file_becomes_a_recipe(tmp_path):
    path = write(
        tmp_path,
        """
        [rollout]
        num_generations = 4
        stop = ["</answer>"]
        [optim]
        learning_rate = 3
        betas = [0.8, 0.9]
        [[rewards]]
        function = "math"
        [[rewards]]
        function = "my:f"
        weight = 0.5
        options = { scale = 2 }
        [eval.task]
        size = 10
        """,
    )
    recipe = load_recipe(path)
    assert recipe.rollout.num_generations == 4
    assert recipe.rollout.stop == ("</answer>",)
    assert recipe.optim.learning_rate == 3.0 and isinstance(recipe.optim.learning_rate, float)
    assert recipe.optim.betas == (0.8, 0.9)
    assert [reward.function for reward in recipe.rewards] == ["math", "my:f"]
    assert recipe.rewards[1].options == {"scale": 2}
    assert recipe.eval.task == TaskConfig(size=10)
    assert recipe.rollout.prompts_per_step == 16  # a default


def test_a_mapping_a_recipe_and_a_run_folder_are_sources(tmp_path):
    recipe = load_recipe({"rollout": {"num_generations": 4}, "task": {"source": tmp_path / "a.jsonl"}})
    assert recipe.task.source == str(tmp_path / "a.jsonl")
    assert load_recipe(recipe) == recipe
    write(tmp_path, dump_recipe(recipe), "config.toml")
    assert load_recipe(tmp_path) == recipe


def test_loading_changes_neither_mapping_nor_overrides():
    data = {"rollout": {"num_generations": 4}}
    overrides = {"rollout.num_generations": 8}
    load_recipe(data, overrides)
    assert data == {"rollout": {"num_generations": 4}}
    assert overrides == {"rollout.num_generations": 8}


def test_windows_files_with_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b'\xef\xbb\xbf[run]\r\nname = "a"\r\n')
    assert load_recipe(path).run.name == "a"


def test_packaged_recipes_load_and_say_what_they_are():
    recipes = packaged_recipes()
    assert "quickstart" in recipes
    for name, comment in recipes.items():
        load_recipe(name)
        assert len(comment) > 10, f"{name} has no first comment line"


def test_a_missing_file_names_the_packaged_recipe_or_the_file_beside_it(tmp_path):
    assert 'did you mean the packaged recipe "quickstart"?' in refusal("recipes/quickstrat.toml")
    write(tmp_path, "", "addition.toml")
    assert str(tmp_path / "addition.toml") in refusal(tmp_path / "adition.toml")
    assert "quickstart" in refusal("zzz")


def test_what_is_not_toml_says_where(tmp_path):
    message = refusal(write(tmp_path, "[run]\nname = run\n"))
    assert "my.toml" in message and "line 2" in message and "quotes" in message
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[run]\nname = "\xe9"\n')
    assert "UTF-8" in refusal(path)


def test_relative_paths_are_taken_here_first_then_beside_the_recipe(tmp_path, monkeypatch):
    here, folder = tmp_path / "here", tmp_path / "recipes"
    here.mkdir()
    folder.mkdir()
    monkeypatch.chdir(here)
    path = write(folder, '[task]\nsource = "data.jsonl"\n[model]\npath = "out"\nchat_template = "chat.jinja"\n')
    write(folder, "", "data.jsonl")
    assert load_recipe(path).task.source == str(folder / "data.jsonl")
    assert load_recipe(path).model.path == "out"  # a folder that is still to be written, or a hub name
    assert load_recipe(path, {"task.source": "data.jsonl"}).task.source == "data.jsonl"
    write(here, "", "data.jsonl")
    assert load_recipe(path).task.source == "data.jsonl"


def test_a_runs_own_recipe_takes_no_file_of_the_run_folder(tmp_path):
    (tmp_path / "model").mkdir()
    path = write(tmp_path, dump_recipe(load_recipe({"model": {"path": "model"}})), "config.toml")
    assert load_recipe(path).model.path == "model"
    assert load_recipe(write(tmp_path, '[model]\npath = "model"\n')).model.path == str(tmp_path / "model")


# --- overrides


@pytest.mark.parametrize(
    "words, read",
    [
        (["--rollout.num_generations", "4"], lambda r: r.rollout.num_generations == 4),
        (["--rollout.num-generations=4"], lambda r: r.rollout.num_generations == 4),
        (["rollout.num_generations=4"], lambda r: r.rollout.num_generations == 4),
        (["--optim.learning-rate", "1e-5"], lambda r: r.optim.learning_rate == 1e-5),
        (["--optim.betas", "0.9,0.95"], lambda r: r.optim.betas == (0.9, 0.95)),
        (["--optim.betas", "[0.9, 0.95]"], lambda r: r.optim.betas == (0.9, 0.95)),
        (["--run.trackers", "tensorboard,wandb"], lambda r: r.run.trackers == ("tensorboard", "wandb")),
        (["--rollout.stop", '["a,b", "\\n"]'], lambda r: r.rollout.stop == ("a,b", "\n")),
        (["--run.name", "7"], lambda r: r.run.name == "7"),
        (["--model.gradient_checkpointing"], lambda r: r.model.gradient_checkpointing is True),
        (["--model.gradient_checkpointing", "false"], lambda r: r.model.gradient_checkpointing is False),
        (["--model.gradient_checkpointing", "--run.seed", "1"], lambda r: r.run.seed == 1),
        (["--eval.task.size", "9"], lambda r: r.eval.task == TaskConfig(size=9)),
        (["--coldstart.steps", "9"], lambda r: r.coldstart == ColdStartConfig(steps=9)),
        (["--coldstart", "{ steps = 9 }"], lambda r: r.coldstart == ColdStartConfig(steps=9)),
        (["--coldstart.steps", "9", "--coldstart", "none"], lambda r: r.coldstart is None),
        (["--correction.kind", "none"], lambda r: r.correction.kind == "none"),
        (["--task.options.digits", "3"], lambda r: r.task.options == {"digits": 3}),
        (["--task.options.kind", "hard"], lambda r: r.task.options == {"kind": "hard"}),
        (["--task.system_prompt", "Think. x = 1"], lambda r: r.task.system_prompt == "Think. x = 1"),
        (["--task.seed", "none"], lambda r: r.task.seed is None),
    ],
)
def test_command_line_words_are_read_by_the_options_type(words, read):
    assert read(load_recipe({}, words))


def test_overrides_reach_a_reward_by_its_number():
    recipe = load_recipe({"rewards": [{"function": "a"}, {"function": "b"}]}, ["--rewards.1.weight", "-2"])
    assert [reward.weight for reward in recipe.rewards] == [1.0, -2.0]
    assert "rewards has 0 entries" in refusal({}, ["--rewards.0.weight", "1"])


def test_an_override_wins_and_the_last_one_counts():
    assert load_recipe({"run": {"seed": 1}}, ["--run.seed", "2", "--run.seed", "3"]).run.seed == 3


def test_overrides_from_python_keep_their_types():
    recipe = load_recipe({}, {"rollout.stop": ("a",), "eval": {"every": 3}, "optim.learning_rate": "1e-5"})
    assert recipe.rollout.stop == ("a",)
    assert recipe.eval.every == 3
    assert recipe.optim.learning_rate == 1e-5


def test_a_table_given_as_an_override_is_added_to_the_section():
    data = {"coldstart": {"steps": 3, "batch_size": 8}}
    assert load_recipe(data, {"coldstart": {"steps": 5}}).coldstart == ColdStartConfig(steps=5, batch_size=8)


def test_none_is_refused_where_an_option_has_no_none():
    assert "must be a whole number" in refusal({}, ["--rollout.num_generations", "none"])


def test_words_that_are_no_override_are_refused():
    with pytest.raises(ConfigError, match="expected --section"):
        list(parse_overrides(["4"]))
    assert "--run.seed: needs a value" in refusal({}, ["--run.seed"])
    assert "TOML table" in refusal({}, ["--coldstart", "yes"])


# --- unknown names


def test_a_wrong_name_gives_file_line_and_the_nearest_name(tmp_path):
    path = write(tmp_path, "# a\n[rollout]\n\nnum_generation = 4\n")
    assert refusal(path) == (f"{path}:4: rollout.num_generation: unknown option; did you mean rollout.num_generations?")


@pytest.mark.parametrize(
    "name, meant",
    [
        ("rollout.num_generation", "rollout.num_generations"),
        ("rollout.beta", "algorithm.beta"),
        ("algorithm.betta", "algorithm.beta"),
        ("num_generations", "rollout.num_generations"),
        ("rollouts.temperature", "rollout.temperature"),
        ("eval.tasks.size", "eval.task.size"),
        ("reward.function", "rewards.function"),
        ("rewards.0.wieght", "rewards.weight"),
        ("train.learning_rate", "optim.learning_rate or coldstart.learning_rate"),
        ("model.rank", "lora.rank"),
        ("optimizer.warmup_update", "optim.warmup_updates"),
    ],
)
def test_the_option_that_was_meant(name, meant):
    assert explain_unknown(name) == f"did you mean {meant}?"


def test_a_name_that_several_sections_have_names_them_all():
    assert explain_unknown("optim.temperature") == "did you mean rollout.temperature or eval.temperature?"


def test_a_name_like_nothing_lists_what_there_is():
    assert "[grading] has workers, timeout_s" in explain_unknown("grading.zzzzzz")
    assert "the sections are run, model" in explain_unknown("zzzzzz")


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_names_of_other_libraries_lead_to_ours(name):
    alias = ALIASES[name]
    assert annotation_of(name) is None, "an option of ours cannot be an alias too"
    message = refusal({}, [f"--{name}", "1"])
    assert f"is {alias.library}'s name" in message
    if alias.ours:
        assert alias.ours == "rewards" or alias.ours in set(option_names())
        assert f"here it is {alias.ours} (" in message
    else:
        assert "no counterpart" in message


def test_names_of_other_libraries_are_found_below_their_own_sections(tmp_path):
    path = write(tmp_path, "[actor_rollout_ref.rollout]\nn = 8\n[actor]\nclip_ratio_high = 0.28\n")
    message = refusal(path)
    assert "my.toml:2: actor_rollout_ref.rollout.n: unknown option; rollout.n is verl's name" in message
    assert "my.toml:4: actor.clip_ratio_high" in message and "algorithm.epsilon_high" in message


def test_all_wrong_names_are_told_at_once(tmp_path):
    path = write(tmp_path, "[run]\nsed = 1\n[rollout]\ntemprature = 1.0\n")
    assert [line.split(": unknown")[0] for line in refusal(path).splitlines()] == [
        f"{path}:2: run.sed",
        f"{path}:4: rollout.temprature",
    ]


def test_the_table_for_people_who_come_from_other_libraries_is_the_code():
    page = (Path(__file__).parents[1] / "docs" / "from-trl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (?:`([^`]+)`|none) \| (.+) \|$", page, flags=re.MULTILINE)
    documented = {name: (library, ours, note) for name, library, ours, note in rows}
    assert documented == {name: (a.library, a.ours, a.note) for name, a in ALIASES.items()}


# --- wrong values


@pytest.mark.parametrize(
    "text, words",
    [
        ("[rollout]\nnum_generations = 4.0", "my.toml:2: rollout.num_generations: must be a whole number, not 4.0"),
        ("[rollout]\nnum_generations = true", "must be a whole number, not true"),
        ('[rollout]\nnum_generations = "4"', 'must be a whole number, not the text "4"'),
        ("[rollout]\ntemperature = 0", "my.toml:2: rollout.temperature: must be above 0, not 0"),
        ("[run]\nseed = -1", "run.seed: must be at least 0, not -1"),
        ("[grading]\nmax_failure_rate = 1.5", "must be at most 1, not 1.5"),
        ("[run]\ndevice = 1", 'must be "auto", "cpu", "cuda" or "mps", not 1'),
        ('[optim]\nschedule = "cosin"', 'did you mean "cosine"?'),
        ("[model]\ngradient_checkpointing = 1", "must be true or false, not 1"),
        ("[model]\npath = 1", "model.path: must be text, not 1"),
        ('[rollout]\nstop = "a"', 'rollout.stop: must be a list, not the text "a"'),
        ("[optim]\nbetas = [0.9]", "my.toml:2: optim.betas: must be a list of 2 numbers, not [0.9]"),
        ("[optim]\nbetas = [0.9, 0.9, 0.9]", "optim.betas: must be a list of 2 numbers"),
        ("rollout = 3", "my.toml:1: rollout: must be a table, not 3"),
        ("[task]\noptions = 3", "task.options: must be a table, not 3"),
        ('[rewards]\nfunction = "a"', "rewards: must be a list"),
        ("[[rewards]]\nweight = 1.0", "my.toml:1: rewards.0.function: is missing"),
        ('[[rewards]]\nfunction = "a"\n[[rewards]]\nfunction = 2', "my.toml:4: rewards.1.function: must be text"),
        ('[run]\nname = "../up"', "starts with a letter or digit"),
        ("[run]\nname = 2024-01-01", "is a date, which a recipe cannot hold"),
        ("[optim]\nlearning_rate = nan", "learning_rate: must be above 0, not nan"),
    ],
)
def test_wrong_values_are_told_without_jargon(tmp_path, text, words):
    assert words in refusal(write(tmp_path, text))


def test_a_wrong_override_says_so_not_the_file(tmp_path):
    path = write(tmp_path, "[run]\nseed = 1\n")
    assert refusal(path, ["--run.seed", "x"]) == '--run.seed: must be a whole number, not the text "x"'


def test_no_message_speaks_of_pydantic(tmp_path):
    path = write(tmp_path, "[run]\nsteps = []\nsave_every = {}\n[task]\nsource = 1.5\n[coldstart]\nsteps = 0\n")
    message = refusal(path)
    assert len(message.splitlines()) == 4
    assert not re.search(r"pydantic|validation|Input|type=|https?:", message)


@pytest.mark.parametrize(
    "data",
    [
        {"task": {"options": {"api_key": "x"}}},
        {"rewards": [{"function": "a", "options": {"hf_token": "x"}}]},
        {"task": {"system_prompt": "hf_" + "a" * 34}},
        {"task": {"source": "https://me:pass@example.org/data"}},
    ],
)
def test_credentials_never_enter_a_recipe(data):
    message = refusal(data)
    assert "credential" in message and "environment" in message
    assert "hf_aaa" not in message and "pass@" not in message


def test_credentials_are_never_written():
    with pytest.raises(ConfigError, match="credential"):
        dump_recipe(Recipe(rewards=(RewardConfig(function="judge:f", options={"api_key": "x"}),)))


def test_ordinary_options_are_no_credentials():
    options = {"max_tokens": 4, "eos_token": "</s>", "keys": "a"}
    assert load_recipe({"task": {"options": options}}).task.options == options


# --- sizes


def test_a_group_of_one_is_refused():
    message = refusal({"rollout": {"num_generations": 1}})
    assert "num_generations = 1" in message and "at least 2" in message


@pytest.mark.parametrize(
    "prompts, updates, valid",
    [
        (3, 4, "updates_per_step 1 or 3, or prompts_per_step 4"),
        (9, 4, "updates_per_step 3 or 9, or prompts_per_step 8 or 12"),
        (1, 4, "updates_per_step 1, or prompts_per_step 4"),
        (16, 3, "updates_per_step 2 or 4, or prompts_per_step 15 or 18"),
    ],
)
def test_updates_that_do_not_divide_the_groups_name_the_nearest_valid_sizes(prompts, updates, valid):
    message = refusal({"rollout": {"prompts_per_step": prompts}, "optim": {"updates_per_step": updates}})
    assert valid in message


def test_single_rollouts_divide_where_groups_do_not():
    data = {
        "rollout": {"prompts_per_step": 3, "num_generations": 8},
        "optim": {"updates_per_step": 4, "minibatches": "rollouts"},
    }
    check_sizes(load_recipe(data))
    message = refusal(data, {"optim.updates_per_step": 5})
    assert "24 rollouts" in message and "updates_per_step 4 or 6" in message


@given(prompts=st.integers(1, 64), generations=st.integers(2, 16), updates=st.integers(1, 16), groups=st.booleans())
def test_what_the_size_check_proposes_is_valid(prompts, generations, updates, groups):
    def sized(prompts: int, updates: int) -> Recipe:
        return Recipe(
            rollout=RolloutConfig(prompts_per_step=prompts, num_generations=generations),
            optim=OptimConfig(updates_per_step=updates, minibatches="groups" if groups else "rollouts"),
        )

    whole = prompts if groups else prompts * generations
    if whole % updates == 0:
        check_sizes(sized(prompts, updates))
        return
    with pytest.raises(ConfigError) as caught:
        check_sizes(sized(prompts, updates))
    proposal = str(caught.value).split("Valid: ")[1]
    for number in re.findall(r"updates_per_step ([\d or]+)", proposal)[0].split(" or "):
        check_sizes(sized(prompts, int(number.strip(" or"))))
    for numbers in re.findall(r"prompts_per_step ([\d or]+)", proposal):
        for number in numbers.split(" or "):
            check_sizes(sized(int(number), updates))


# --- writing


FULL = Recipe(
    run=RunConfig(name="a", trackers=("tensorboard",), output_dir='odd "quoted" \\ folder\n\x1b[31m\x7f'),
    model=ModelConfig(path="模型/é", trust_remote_code=True, revision="abc"),
    task=TaskConfig(
        source="a.jsonl", options={"a b": [1, 2.5, True, "x"], "nested": {"deep": {"k": "v"}}, "empty": {}}
    ),
    rewards=(RewardConfig(function="math", weight=0.1), RewardConfig(function="m:f", options={"x": -1})),
    algorithm=AlgorithmConfig(epsilon_high=math.inf, epsilon=3e-4),
    optim=OptimConfig(learning_rate=1e-16, betas=(0.1, 1 / 3)),
    eval=EvalConfig(task=TaskConfig(size=3, seed=0)),
    coldstart=ColdStartConfig(base="b", task=TaskConfig(size=5)),
)


@pytest.mark.parametrize("recipe", [Recipe(), FULL, *map(load_recipe, packaged_recipes())])
def test_a_written_recipe_reads_back_the_same(recipe):
    text = dump_recipe(recipe)
    again = load_recipe(tomllib.loads(text))
    assert again == recipe
    assert dump_recipe(again) == text


def test_a_task_that_takes_after_another_stays_so():
    """What [eval.task] leaves out comes from [task], so writing its defaults out would change the run."""
    recipe = load_recipe({"task": {"source": "a", "size": 5}, "eval": {"task": {"seed": 1}}})
    again = load_recipe(tomllib.loads(dump_recipe(recipe)))
    assert again.eval.task.model_fields_set == {"seed"}
    assert load_recipe(recipe).eval.task.model_fields_set == {"seed"}


def test_every_default_is_written_out():
    data = tomllib.loads(dump_recipe(Recipe()))
    assert data["optim"]["betas"] == [0.9, 0.99]
    assert data["rollout"]["num_generations"] == 8
    assert set(data) == {name for name, value in Recipe() if value is not None and name != "rewards"}


def test_what_toml_cannot_hold_is_refused():
    for options in ({"a": None}, {"a": object()}):
        with pytest.raises(ConfigError, match=r"task.options.a: .* cannot be written"):
            dump_recipe(Recipe(task=TaskConfig(options=options)))
    with pytest.raises(ConfigError, match=r"eval\.task\.size = None"):
        dump_recipe(Recipe(eval=EvalConfig(task=TaskConfig(size=None))))


json_values = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=200)
@given(options=st.dictionaries(st.text(), json_values, max_size=4), text=st.text())
def test_any_text_and_options_survive_writing(options, text):
    recipe = Recipe(task=TaskConfig(options=options, system_prompt=text))
    data = tomllib.loads(dump_recipe(recipe))
    assert data["task"]["system_prompt"] == text
    assert data["task"]["options"] == options
    assert recipe_module.load_recipe(data) == recipe
