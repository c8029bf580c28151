"""The recipe: every option of a run, as frozen pydantic models read from TOML and dotted overrides.

At most 15 fields a section and 110 in all; ``tests/test_config.py`` holds the list. None means "the default of what
was chosen" (the algorithm's, the task's); the resolved value is what ``config.toml`` in the run folder shows.
Unknown keys are refused here; combinations that mean nothing are refused by ``gspo.training.resolve``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token"]


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunConfig(Section):
    """Where the run lives and how long it goes."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder inside ``output_dir``; a number is appended when it is taken."""
    output_dir: str = "runs"
    """Folder that holds the run folders."""
    seed: NonNegativeInt = 0
    """Seed of everything: data order, rollouts, shuffling, initial weights."""
    steps: PositiveInt = 100
    """Steps of the run: one step = one rollout batch and its updates."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the policy lives; auto takes cuda, then mps, then cpu."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads of torch; 0 leaves torch's own choice."""
    save_every: NonNegativeInt = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep, beside the best one."""
    trackers: tuple[str, ...] = ()
    """Trackers beside the JSONL files: "tensorboard", "wandb", or a dotted path."""


class ModelConfig(Section):
    """The policy's weights."""

    path: str = ""
    """Hugging Face folder or hub name; with ``[coldstart]``, the folder that the cold start writes."""
    gguf_file: str | None = None
    """A GGUF file inside ``path``; it is converted once to a Hugging Face folder."""
    revision: str | None = None
    """Commit of a hub model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Master weights; a bfloat16 weight does not move at a learning rate of 1e-6."""
    autocast: Literal["auto", "none", "bfloat16"] = "auto"
    """Precision of the forward pass; auto is bfloat16 on cuda and none elsewhere. Ratios stay float32."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernels."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more compute."""
    trust_remote_code: bool = False
    """Run code shipped with a model; needs ``revision``."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""


class LoraConfig(Section):
    """Low-rank adapters (peft). Rank 0 trains all weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 = off."""
    alpha: PositiveFloat = 32.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Module names; all-linear means every linear layer but the head, routers and experts."""


class TaskConfig(Section):
    """Where prompts come from."""

    source: str = ""
    """A .jsonl or .parquet file, a hub data set, "reasoning_gym:NAME", "addition", or a dotted path."""
    name: str | None = None
    """Name of the task in logs; the source's by default."""
    split: str | None = None
    """Split of a hub data set ("train")."""
    subset: str | None = None
    """Configuration of a hub data set ("main")."""
    size: PositiveInt | None = None
    """Rows to take: the first of a file, or how many a generator makes."""
    seed: NonNegativeInt | None = None
    """Seed of a generator; the run's by default. A held-out task takes another."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a generator."""
    prompt_column: str | None = None
    """Column with the prompt; found by its usual names when not given."""
    answer_column: str | None = None
    """Column with the reference answer; likewise."""
    system_prompt: str | None = None
    """System message put before each prompt."""
    prompt_template: str | None = None
    """Text with {prompt} in it, put around each prompt."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template; auto: where it has one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template (enable_thinking = false)."""
    max_prompt_length: PositiveInt | None = None
    """Longest prompt in tokens."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What becomes of longer ones: dropped and counted, or an error."""


class RewardConfig(Section):
    """One reward function."""

    function: str
    """A built-in ("math", "exact", "format", "reasoning_gym", "length") or "module:function"."""
    weight: float = 1.0
    """Weight in the sum."""
    signature: Literal["gspo", "trl"] = "gspo"
    """gspo: f(rollout) -> float, dict or None; trl: f(prompts=, completions=, **columns) -> list."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class GradingConfig(Section):
    """The worker processes that run reward functions."""

    workers: PositiveInt = 2
    """Number of worker processes."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one reward call; the worker is killed beyond it and the rollout is ungraded."""
    in_process: bool = False
    """Run rewards in the training process: no deadline, no containment."""
    max_failure_rate: float = Field(0.5, ge=0.0, le=1.0)
    """Share of failed gradings in one step beyond which the run stops."""


class RolloutConfig(Section):
    """How completions are sampled."""

    prompts_per_step: PositiveInt = 16
    """Prompts of one step."""
    num_generations: PositiveInt = 8
    """Completions of each prompt: the group."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner divides its logits by the same."""
    max_completion_length: PositiveInt = 256
    """Longest completion in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    max_batch_size: PositiveInt = 64
    """Sequences the embedded engine decodes at once."""
    engine: str = "local"
    """Who samples."""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the engine's weights; auto shares the learner's, or is bfloat16 where its forward pass is."""
    mask_truncated_completions: bool = False
    """Leave completions cut by a length limit out of the update (they still count in their group's mean)."""


class AlgorithmConfig(Section):
    """The loss. A name of the catalogue, and what departs from its defaults."""

    name: str = "gspo"
    """gspo, gspo_token, grpo, dapo, dr_grpo, cispo, gmpo, sapo, luspo, rloo, reinforce_pp_baseline, minirl."""
    importance_sampling_level: ImportanceSamplingLevel | None = None
    """Unit of the importance ratio."""
    advantage: str | None = None
    """Advantage estimator by name or dotted path."""
    reduction: str | None = None
    """How token losses become one number."""
    epsilon: NonNegativeFloat | None = None
    """Lower clip range: the ratio is clipped below 1 - epsilon."""
    epsilon_high: NonNegativeFloat | None = None
    """Upper clip range: above 1 + epsilon_high."""
    delta: PositiveFloat | None = None
    """Upper bound of the ratio where the advantage is negative (two-sided clip)."""
    tau_positive: PositiveFloat | None = None
    """SAPO's temperature for positive advantages."""
    tau_negative: PositiveFloat | None = None
    """SAPO's temperature for negative advantages."""
    loss_constant: PositiveFloat | None = None
    """Divisor of a constant-length reduction (Dr. GRPO)."""
    beta: NonNegativeFloat | None = None
    """Weight of the KL to the reference model; 0 loads none."""
    kl_estimator: str | None = None
    """Estimator of that KL."""
    proximal_logprobs: Literal["recompute", "engine", "detach"] = "recompute"
    """The ratio's denominator: the learner's own, the engine's (the paper's 5.4), or the current, detached."""


class CorrectionConfig(Section):
    """Correction of the mismatch between the engine that samples and the learner."""

    kind: str | None = None
    """none, or token / sequence_geometric / sequence_product with _truncate or _mask."""
    max: PositiveFloat | None = None
    """Upper bound of the weight proximal / sampled."""
    min: NonNegativeFloat | None = None
    """Lower bound, for the masks."""
    off_policy_mask_delta: PositiveFloat | None = None
    """Drop sequences with a negative advantage whose mean log(sampled / current) exceeds this."""


class OptimConfig(Section):
    """The updates of a step."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up, towards 0 at the end of the run."""
    warmup_updates: NonNegativeInt = 0
    """Updates of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's moments."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm beyond which gradients are scaled down."""
    updates_per_step: PositiveInt = 4
    """Optimizer updates per rollout batch; the paper splits it into 4 minibatches."""
    minibatches: Literal["groups", "rollouts"] = "groups"
    """What an update takes: whole groups, or single rollouts shuffled."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Token budget of one forward pass; it changes memory, never the result."""


class EvalConfig(Section):
    """Held-out evaluation inside the run."""

    every: NonNegativeInt = 10
    """Steps between evaluations; also at step 0 and at the end. 0 = never."""
    task: TaskConfig | None = None
    """The held-out task; what it leaves out is taken from ``[task]``."""
    num_samples: PositiveInt = 1
    """Completions of each item (avg@n)."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    max_completion_length: PositiveInt | None = None
    """Longest completion; the rollouts' by default."""
    reward: str | None = None
    """Name of the reward part that counts as accuracy; the weighted sum by default."""


class ColdStartConfig(Section):
    """Supervised fine-tuning before reinforcement learning, from a base model or from nothing."""

    base: str | None = None
    """Model to fine-tune (a path may end in a .gguf file); without it a tiny model is built from scratch."""
    architecture: Literal["qwen3", "qwen3_moe"] = "qwen3"
    """Architecture built from scratch."""
    hidden_size: PositiveInt = 128
    """Width."""
    num_layers: PositiveInt = 4
    """Layers."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    num_experts: PositiveInt = 16
    """Experts of a layer (qwen3_moe)."""
    num_experts_per_tok: PositiveInt = 2
    """Experts a token is sent to (qwen3_moe)."""
    max_length: PositiveInt = 512
    """Longest example in tokens, and the context of a model built from scratch."""
    steps: PositiveInt = 150
    """Batches of fine-tuning."""
    batch_size: PositiveInt = 64
    """Examples a batch."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate; linear warm-up over a tenth, then cosine to 0."""
    completion_column: str = "demonstration"
    """Column with the worked answer to imitate."""
    task: TaskConfig | None = None
    """Examples; what it leaves out is taken from ``[task]``."""


class Recipe(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    rewards: tuple[RewardConfig, ...] = ()
    grading: GradingConfig = Field(default_factory=GradingConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    coldstart: ColdStartConfig | None = None
