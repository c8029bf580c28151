"""Where rows come from: files, hub data sets, reasoning-gym, a function of the user's, a list in memory.

Each reader gives numbered rows, or ready prompts. Packages that only one source needs are imported in its
reader.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.errors import MissingExtra, TaskError
from gspo.seeding import seed as derive_seed
from gspo.tasks.generators import check_option_names
from gspo.tasks.rows import NumberedRow
from gspo.tasks.task import TaskOptions
from gspo.types import Prompt

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".xlsx", ".arrow", ".pkl", ".pt", ".bin", ".yaml", ".toml", ".zip", ".gz")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?:/[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)?")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_dotted_path(source: str) -> bool:
    """Whether ``source`` reads as "module:function"."""
    return _DOTTED.fullmatch(source) is not None


def read_file(path: Path, size: int | None = None) -> Iterator[NumberedRow]:
    """Rows of a .jsonl, .ndjson, .json (an array, or lines) or .parquet file, the first ``size``."""
    if not path.is_file():
        siblings = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else []
        near = get_close_matches(path.name, siblings, n=1)
        hint = f"did you mean {str(path.parent / near[0])!r}?" if near else f"looked from {str(Path.cwd())!r}"
        raise TaskError(f"no such file: {str(path)!r}; {hint}")
    reader = _read_parquet if path.suffix == ".parquet" else _read_json_lines
    if path.suffix == ".json" and _first_character(path) == b"[":
        reader = _read_json_array
    return itertools.islice(reader(path), size)


def first_rows(path: str | Path, count: int = 100) -> list[dict[str, Any]]:
    """The first ``count`` readable rows of a file, for ``recognise_columns``."""
    readable = (dict(numbered.row) for numbered in read_file(Path(path)) if numbered.row)
    return list(itertools.islice(readable, count))


def read_rows(rows: Iterable[Any]) -> Iterator[NumberedRow]:
    """Rows of any iterable of mappings, numbered from 1."""
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Mapping):
            yield NumberedRow(number, row)
        else:
            yield NumberedRow(number, None, f"a row must be a dict or a Prompt, not {type(row).__name__}")


def read_hub(options: TaskOptions) -> Iterator[NumberedRow]:
    """Rows of a hub data set, of a folder written by ``save_to_disk``, or of a folder with data files."""
    name = str(options.source)
    folder = Path(name)
    if folder.suffix in _OTHER_SUFFIXES:
        raise TaskError(f"{name!r}: {folder.suffix} is not read; convert it to one of {', '.join(FILE_SUFFIXES)}")
    if not folder.is_dir() and not _HUB_NAME.fullmatch(name):
        raise TaskError(unknown_source(name))
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "datasets", f"The data set {options.source!r}") from error
    try:
        if folder.is_dir() and any((folder / f).exists() for f in ("dataset_dict.json", "state.json")):
            data = datasets.load_from_disk(name)
        else:
            data = datasets.load_dataset(name, options.subset, split=options.split or "train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise TaskError(
            f"the data set {name!r} (subset {options.subset!r}, split {options.split or 'train'!r}) cannot "
            f"be loaded: {type(error).__name__}: {str(error)[:300]}. A file's name must end in one of "
            f"{', '.join(FILE_SUFFIXES)}. Without a network: save the data set with datasets' save_to_disk "
            f"and name that folder"
        ) from error
    return read_rows(itertools.islice(_one_split(data, name, options.split), options.size))


def read_reasoning_gym(options: TaskOptions, seed: int) -> Iterator[NumberedRow]:
    """Items of a reasoning-gym data set. The whole entry is in ``metadata["entry"]`` for its
    ``score_answer``.

    reasoning-gym seeds item i with seed + i, so neighbouring seeds would share nearly all items: the seed it
    is given is derived by hashing. ``size`` is 500 by default.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra("reasoning-gym", "reasoning-gym", f"The task {options.source!r}") from error
    name = str(options.source).partition(":")[2]
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3)
        raise TaskError(f"reasoning-gym has no data set {name!r}; nearest: {', '.join(near) or 'none'}")
    fields = DATASETS[name][1].__dataclass_fields__
    check_option_names(options.options, set(fields) - {"seed", "size"}, f"reasoning_gym:{name}")
    arguments = {
        **options.options,
        "seed": derive_seed(seed, "reasoning_gym") % 2**31,
        "size": options.size or 500,
    }
    try:
        data = reasoning_gym.create_dataset(name, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(f"reasoning_gym:{name} refuses its options {dict(options.options)}: {error}") from error
    for number in range(len(data)):
        entry = data[number]
        row = {
            "question": entry["question"],
            "answer": entry["answer"],
            "entry": entry,
            "source_dataset": name,
        }
        yield NumberedRow(number + 1, row)


def call_dotted(source: str, options: TaskOptions) -> Iterable[Any]:
    """What "module:function" returns, called with ``options.options`` as keyword arguments."""
    module_name, _, function_name = source.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TaskError(
            f"source {source!r}: the module {module_name!r} cannot be imported: {error}. "
            f"It must be installed or lie on PYTHONPATH"
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        names = get_close_matches(function_name, vars(module), n=3)
        raise TaskError(
            f"source {source!r}: no function {function_name!r} there; nearest: {', '.join(names) or 'none'}"
        )
    try:
        inspect.signature(function).bind(**options.options)
    except TypeError as error:
        raise TaskError(f"source {source!r} does not take options {dict(options.options)}: {error}") from error
    result = function(**options.options)
    if isinstance(result, str | Mapping) or not isinstance(result, Iterable):
        raise TaskError(f"source {source!r} returned {type(result).__name__}; an iterable of Prompt or dicts is needed")
    return result


def split_prompts(items: Iterable[Any], size: int | None) -> tuple[list[Prompt], list[Any]]:
    """(prompts, rows) of the first ``size`` items; TaskError where they are mixed."""
    taken = list(itertools.islice(items, size))
    prompts = [item for item in taken if isinstance(item, Prompt)]
    if prompts and len(prompts) != len(taken):
        at = next(number for number, item in enumerate(taken, start=1) if not isinstance(item, Prompt))
        raise TaskError(f"row {at} is {type(taken[at - 1]).__name__} among Prompts: give Prompts or dicts, not both")
    return prompts, [] if prompts else taken


def task_name(options: TaskOptions) -> str:
    """The name given, or one made of the source: fit for a file name, so no separators, no leading dot."""
    if options.name is not None:
        if not _PLAIN_NAME.fullmatch(options.name):
            raise TaskError(f"task name {options.name!r}: letters, digits, dot, dash and underscore are allowed")
        return options.name
    if not isinstance(options.source, str):
        return "task"
    base = options.source
    if base.endswith(FILE_SUFFIXES):
        base = Path(base).stem
    elif Path(base).is_dir():
        base = Path(base).resolve().name
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", base.rstrip("/")).strip("-._")
    return cleaned or "task"


def unknown_source(source: str) -> str:
    """The message for a source that is of no known kind."""
    near = get_close_matches(source, ("addition", "reasoning_gym:"), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"source {source!r} is no file ({', '.join(FILE_SUFFIXES)}), no folder, no generator (addition), no "
        f'"reasoning_gym:NAME", no "module:function" and no name of a hub data set{hint}'
    )


def _read_json_lines(path: Path) -> Iterator[NumberedRow]:
    """Rows of JSON lines in UTF-8, with or without a byte order mark, CRLF or blank lines."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise TaskError(f"{path} is UTF-16; save it as UTF-8")
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _json_row(number, line)


def _json_row(number: int, line: bytes) -> NumberedRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return NumberedRow(number, None, f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return NumberedRow(number, None, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return NumberedRow(number, None, "not usable JSON: nested too deeply")
    if not isinstance(row, dict):
        return NumberedRow(number, None, f"a JSON {type(row).__name__}, not an object")
    return NumberedRow(number, row)


def _read_json_array(path: Path) -> Iterator[NumberedRow]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise TaskError(f"{path} is not JSON: {error}") from error
    return read_rows(rows)


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096)
        yield from read_rows(row for batch in batches for row in batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise TaskError(f"{path} cannot be read as Parquet: {error}") from error


def _one_split(data: Any, name: str, split: str | None) -> Iterable[Any]:
    """The split meant, where a saved folder holds several."""
    if not isinstance(data, dict):
        return data
    if split is None and len(data) == 1:
        return next(iter(data.values()))
    wanted = split or "train"
    if wanted not in data:
        raise TaskError(f"data set {name!r} has no split {wanted!r}; it has: {', '.join(data)}")
    return data[wanted]
