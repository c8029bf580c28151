"""The policy: one module around a Hugging Face causal LM whose forward returns selected log-probs.

Loading (folder, hub name, GGUF converted once), LoRA, the reference model, saving. Only safetensors are read and
written. Nothing outside this file reaches for the backbone or the head.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gspo.errors import MissingExtra, ModelError
from gspo.policy.logprobs import logit_transform_of, selected_logprobs
from gspo.policy.packing import MicroBatch

ROUTER_OR_EXPERT = re.compile(r"(^|\.)(gate|router|experts?|shared_expert_gate)(\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a policy. ``path``: a folder, a hub name, or ``package:NAME`` (an installed package's folder)."""

    path: str
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    autocast: str = "auto"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    chat_template: str | None = None
    device: str = "auto"
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    seed: int = 0  # of the adapters' initial weights


class Policy(nn.Module):
    """A causal LM and its tokenizer. ``forward`` returns the log-probs of the scored tokens of a micro-batch."""

    def __init__(self, model: nn.Module, tokenizer: Any, *, autocast: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.logit_transform = logit_transform_of(self.hf.config)

    @property
    def hf(self) -> Any:
        """The Hugging Face model, whether or not adapters wrap it."""
        peft_model = _peft_type()
        wrapped = peft_model is not None and isinstance(self.model, peft_model)
        return self.model.base_model.model if wrapped else self.model

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(self.model.parameters()).device

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA adapters are in place."""
        return self.hf is not self.model

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters that receive gradients, in a fixed order."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a completion: the generation config's, the model's and the tokenizer's."""
        found: set[int] = set()
        generation = self.hf.generation_config
        for value in (generation and generation.eos_token_id, self.tokenizer.eos_token_id):
            found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
        return tuple(sorted(found))

    def max_length(self) -> int:
        """The context window in tokens; 0 when the model states none."""
        return int(self.hf.config.to_dict().get("max_position_embeddings") or 0)

    def forward(
        self, batch: MicroBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) of the scored tokens, float32 [n] in row order, of softmax(logits / temperature).

        The token at position t is predicted from t - 1. Entropies carry no gradient and are in nats.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.hf.base_model(
                input_ids=batch.token_ids, attention_mask=batch.attention_mask, use_cache=False
            )[0]
            chosen = batch.scored[:, 1:]
            return selected_logprobs(
                hidden[:, :-1][chosen],
                self.hf.get_output_embeddings(),
                batch.token_ids[:, 1:][chosen],
                temperature=temperature,
                logit_transform=self.logit_transform,
                with_entropy=with_entropy,
            )

    @contextlib.contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """The base model under a disabled adapter."""
        with self.model.disable_adapter():
            yield

    def frozen_copy(self) -> Policy:
        """A copy without gradients, for the reference model."""
        twin = Policy(copy.deepcopy(self.model), self.tokenizer, autocast=self.autocast)
        twin.requires_grad_(False)
        return twin.eval()

    def verify_head(self) -> None:
        """Compare forward's log-probs with the model's own logits on a few tokens.

        Raises ModelError where a family transforms its logits in a way unknown here: its log-probs would be wrong.
        """
        ids = torch.arange(1, 5, device=self.device).unsqueeze(0) % self.hf.config.get_text_config().vocab_size
        ones = torch.ones_like(ids)
        with torch.no_grad():
            ours, _ = self.forward(MicroBatch(ids, ones, ones.bool()))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                logits = self.model(input_ids=ids, attention_mask=ones, use_cache=False).logits
            theirs = torch.log_softmax(logits[0, :-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
        if not torch.allclose(ours.float(), theirs, atol=5e-2 if self.autocast else 1e-3):
            raise ModelError(
                f"{type(self.hf).__name__} changes its logits after the head in a way this version does not know "
                f"(log-probs differ by {(ours - theirs).abs().max():.3g}); teach policy.logprobs.logit_transform_of"
            )

    def save(self, folder: Path, *, record: Mapping[str, Any] | None = None, name: str = "record.json") -> None:
        """Write a Hugging Face folder (safetensors) with the tokenizer; with LoRA, the adapter.

        Whole or not at all: written beside ``folder``, which it then replaces. ``record`` goes into the file ``name``.
        """
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with without_bars():
            self.model.save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        if record is not None:
            (partial / name).write_text(json.dumps(record, indent=1), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' progress bars for reading and writing local files."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def pick_device(name: str) -> torch.device:
    """``auto`` takes cuda, then mps, then cpu. Raises ModelError for a device that is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    if not available[name]:
        there = ", ".join(kind for kind, yes in available.items() if yes)
        raise ModelError(f'run.device = "{name}" is not available here (available: {there}); use "auto"')
    return torch.device(name)


def load_policy(options: LoadOptions) -> Policy:
    """Load a policy with its tokenizer, adapters in place, dropout off.

    Raises ModelError for a missing folder, pickled weights, or nothing trainable.
    """
    device = pick_device(options.device)
    folder = resolve_path(options)
    model = _load_model(folder, options).to(device)
    if options.lora_rank:
        model = _add_lora(model, options)
    policy = Policy(model, load_tokenizer(folder, options), autocast=uses_autocast(options.autocast, device))
    require_trainable(policy)
    if options.gradient_checkpointing:
        _checkpoint_activations(policy.hf)
        policy.train()
    else:
        policy.eval()  # dropout is 0 anyway; some families add noise in train mode
    policy.verify_head()
    return policy


def require_trainable(policy: Policy) -> None:
    """Raises ModelError for a policy none of whose parameters receives gradients."""
    if not policy.trainable():
        raise ModelError(
            f"{type(policy.hf).__name__}: 0 trainable parameters; unfreeze the model (requires_grad), or set "
            f"lora.rank above 0"
        )


def require_no_noise(policy: Policy) -> None:
    """Turn dropout off: evaluation mode, but for activation checkpointing, which transformers does in train mode only.

    Raises ModelError where that train mode would drop activations.
    """
    if not _checkpoints_activations(policy.hf):
        policy.eval()
        return
    noisy = {name: value for name, value in policy.hf.config.to_dict().items() if _is_noise(name, value) and value}
    if noisy:
        raise ModelError(
            f"activation checkpointing runs in train mode, and the model's config has {noisy}: set them to 0 before "
            f"the model is built (gspo.policy.model.silence_noise)"
        )


def resolve_path(options: LoadOptions) -> str:
    """The folder or hub name to load from; a GGUF file is converted once into the user's cache folder."""
    path = options.path
    if not path:
        raise ModelError("model.path is empty: give a Hugging Face folder or hub name, or add a [coldstart] section")
    if path.startswith("package:"):
        spec = importlib.util.find_spec(path.removeprefix("package:"))
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(f"model.path = {path!r}: no such installed package; pip install it first")
        path = next(iter(spec.submodule_search_locations))
    if options.gguf_file:
        return str(_convert_gguf(Path(path), options.gguf_file))
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ModelError(f"model.path = {path!r} holds no config.json: it is no Hugging Face model folder")
    if not Path(path).exists() and (path.count("/") != 1 or path.startswith((".", "/"))):
        raise ModelError(
            f"model.path = {path!r} does not exist. Give a Hugging Face folder or a hub name (owner/name), or add a "
            f"[coldstart] section that builds it"
        )
    return path


def load_tokenizer(folder: str, options: LoadOptions) -> Any:
    """The tokenizer of a model folder. A missing pad token is left missing: padding here never needs one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer in {folder}: {error}") from error
    if options.chat_template:
        template = Path(options.chat_template)
        if not template.is_file():
            raise ModelError(f"model.chat_template = {options.chat_template!r}: no such file")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _load_model(folder: str, options: LoadOptions) -> Any:
    """Load weights from safetensors with every dropout and router noise set to 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if options.trust_remote_code and not options.revision and not Path(folder).exists():
        raise ModelError("model.trust_remote_code needs model.revision: pin the commit whose code you read")
    source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **source)
        silence_noise(config)
        with without_bars():
            return AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=options.dtype,
                attn_implementation=options.attn_implementation,
                use_safetensors=True,
                **source,
            )
    except ImportError as error:  # kernels, or a package that a model's own code wants
        raise ModelError(f'cannot load {folder}: {error}. Or set model.attn_implementation = "sdpa"') from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot load {folder}: {str(error).rstrip('. ')}. For a folder check model.path; a hub name needs the "
            f"network or a cached copy. Only safetensors weights are read (.bin and .pt files can run code when loaded)"
        ) from error


def silence_noise(config: Any) -> None:
    """Set every dropout and router jitter of a config to 0: noise between two passes would move ratios off 1."""
    for name, value in config.to_dict().items():
        if _is_noise(name, value):
            setattr(config, name, 0.0)


def _is_noise(name: str, value: Any) -> bool:
    noisy = "dropout" in name or name.endswith("_pdrop") or name == "router_jitter_noise"
    return noisy and isinstance(value, float)


def _add_lora(model: Any, options: LoadOptions) -> Any:
    """Wrap with LoRA adapters; all-linear leaves out the head, routers and experts."""
    from peft import LoraConfig

    targets = list(options.lora_target_modules)
    if targets == ["all-linear"]:
        head = model.get_output_embeddings()
        targets = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head and not ROUTER_OR_EXPERT.search(name)
        ]
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]  # peft divides; a float is as good
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return _with_adapters(model, config, options.seed)
    except ValueError as error:
        raise ModelError(f"lora.target_modules = {options.lora_target_modules}: {error}") from error


def _with_adapters(model: Any, config: Any, seed: int) -> Any:
    """peft draws the adapters' first weights from torch's global generator: seeded here, and given back as it was."""
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def _checkpoint_activations(model: Any) -> None:
    """Activation checkpointing under either of transformers' names (the old one goes in its version 6)."""
    if "activation_checkpointing_enable" in dir(model):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


def _checkpoints_activations(model: Any) -> bool:
    """Whether activation checkpointing is on, under either of transformers' names."""
    new = "is_activation_checkpointing" in dir(type(model))
    return bool(model.is_activation_checkpointing if new else model.is_gradient_checkpointing)


def _convert_gguf(folder: Path, name: str) -> Path:
    """Convert a GGUF file to a Hugging Face folder, once: the result is kept under its content's hash."""
    source = folder / name
    if not source.is_file():
        there = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "none"
        raise ModelError(f"model.gguf_file: no file {source} (GGUF files there: {there})")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra("gguf", "gguf", f"reading {name}")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo" / "converted"
    target = cache / f"{source.stem}-{digest}"
    if not (target / "config.json").is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        partial = cache / f".{target.name}.{os.getpid()}"
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=name, dtype="float32")
        model.hf_quantizer = None  # save_pretrained refuses a model that it believes quantised
        model.config.quantization_config = None
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(str(folder), gguf_file=name).save_pretrained(partial)
        with contextlib.suppress(OSError):  # another process was first: its folder is the same
            partial.rename(target)
    return target


def uses_autocast(setting: str, device: torch.device) -> bool:
    """Whether the forward pass runs under bfloat16 autocast: ``auto`` does on cuda."""
    return setting == "bfloat16" or (setting == "auto" and device.type == "cuda")


def _peft_type() -> Any:
    """peft's model class, without importing peft where nobody has."""
    import sys

    module = sys.modules.get("peft")
    return module.PeftModel if module else None
