"""A Hugging Face causal LM driven through its attention seam; no model code is changed (but see projections.py).

`AttentionInterface.register` adds one function under our name; `set_attn_implementation` selects it on our instance.
The function receives q, k, v after the model's own RoPE, and whatever object `forward(plan=...)` was given: the step
(`Step`), or a `Probe` while the model is examined at load time. Traps avoided here: the implementation is selected
after construction and then read back (a failed selection only logs), `attention_mask=None` and `use_cache=False` are
passed always, and the name is not in the mask interface, so no T x T mask is ever built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lazy_rag_kernels import AttentionPlan, LayerPages, live_attention, write_kv
from lazy_rag_kernels.rotary import rotate
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lazy_rag.errors import ConfigError, UnsupportedModelError
from lazy_rag.families import family_of, rope_table
from lazy_rag.pool import KVShape
from lazy_rag.projections import join, seen_inputs, siblings
from lazy_rag.rope import RopeTable

SEAM = "lazy_rag"

# Largest |k(p + delta) - R(delta) k(p)| / |k| (Euclidean norms) taken for rounding. A wrong pairing, a learned position
# or changing frequencies are off by 0.3 or more. Far positions round to about 1e-3 in float32; in bfloat16 the hidden
# states of deep layers drift apart by some percent.
_INVARIANCE_FLOAT = 5e-3
_INVARIANCE_HALF = 1e-1


_NOT_ALONE = "this model is driven by a lazy-rag Runtime and cannot be called on its own until the runtime is closed"


class Attender(Protocol):
    """What travels through `forward(plan=...)` to every attention layer."""

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float, extras: dict[str, Any]) -> Tensor:
        """q [T, H, Dk], k [T, HKV, Dk], v [T, HKV, Dv] to [T, H, Dv]. Keys and values may have any strides."""
        ...


def _seam(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plan: Attender | None = None,
    scaling: float = 1.0,
    **extras: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls, with [1, heads, T, D] tensors."""
    if torch.compiler.is_compiling():  # opaque to the compiler; the step it serves is the calling thread's
        return _compiled_attend(query, key, value, scaling, *_extras(extras)), None  # type: ignore[no-any-return]
    if plan is None:
        raise UnsupportedModelError(_NOT_ALONE)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return plan.attend(module, q, k, v, scaling, extras).unsqueeze(0), None


def _extras(extras: dict[str, Any]) -> tuple[int | None, float | None, Tensor | None]:
    return extras.get("sliding_window"), extras.get("softcap"), extras.get("s_aux")


class _Current(threading.local):
    """The step a thread's compiled forward pass serves, and the layers still to come: a compiled graph takes tensors
    and numbers only, and a number of its own for every layer would compile each anew."""

    attender: Attender | None = None
    layers: Iterator[int] = iter(())


_current = _Current()


@dataclass(frozen=True)
class _Layer:
    layer_idx: int


@torch.library.custom_op(
    "lazy_rag::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scaling, SymInt? window, float? softcap, Tensor? sinks) -> "
    "Tensor",
)
def _compiled_attend(query, key, value, scaling, window, softcap, sinks):  # type: ignore[no-untyped-def]
    """`_seam` inside a compiled forward pass. K and V go to the pool, which the compiler never sees."""
    attender = _current.attender
    if attender is None:
        raise UnsupportedModelError(_NOT_ALONE)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    extras = {"sliding_window": window, "softcap": softcap, "s_aux": sinks}
    return attender.attend(_Layer(next(_current.layers)), q, k, v, scaling, extras).unsqueeze(0)


@_compiled_attend.register_fake
def _(query, key, value, scaling, window, softcap, sinks):  # type: ignore[no-untyped-def]
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@dataclass(frozen=True)
class Step:
    """One forward pass over paged KV: the plan, and each layer's pages and position encoding."""

    plan: AttentionPlan
    layers: Sequence[LayerPages]
    rope: RopeTable

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float, extras: dict[str, Any]) -> Tensor:
        pages, rope = self.layers[module.layer_idx], self.rope.layers[module.layer_idx]
        window, softcap, sinks = _extras(extras)
        write_kv(k, v, pages, self.plan)
        return live_attention(
            q,
            k,
            v,
            pages,
            self.plan,
            scaling=scaling,
            rotation=rope.rotation if rope else None,
            angles=self.plan.angles[rope.frequencies] if rope else None,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )


class Probe:
    """Plain causal attention that remembers what each layer was given."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.query_heads: dict[int, int] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float, extras: dict[str, Any]) -> Tensor:
        layer, group = module.layer_idx, q.shape[1] // k.shape[1]
        if layer in self.modules:
            raise UnsupportedModelError(f"layer {layer} calls attention twice in one forward pass")
        self.modules[layer], self.keys[layer], self.values[layer] = module, k, v
        self.query_heads[layer] = q.shape[1]
        scores = torch.einsum("thd,lhd->htl", q.float(), k.repeat_interleave(group, 1).float()) * scaling
        hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("htl,lhd->thd", weights, v.repeat_interleave(group, 1).float()).to(q.dtype)


def _layers_around(model: nn.Module, attention: Collection[nn.Module]) -> list[nn.Module]:
    """The members of a model's list of layers, one around each attention module; the whole body if it has no such list.

    The list is a ModuleList in every family of transformers.
    """
    wanted = set(attention)
    for found in model.modules():
        if isinstance(found, nn.ModuleList) and len(found) == len(wanted):
            around = [wanted.intersection(layer.modules()) for layer in found]
            if all(len(inside) == 1 for inside in around) and set().union(*around) == wanted:
                return list(found)
    return [model.base_model]  # type: ignore[list-item]


class LanguageModel:
    """A causal LM behind the seam, examined on this very instance.

    Attributes: `kv_shapes` and `query_heads` (per layer), `rope`, `dtype`, `device`, `max_positions`.

    Args:
        model: a `transformers` causal LM; its attention implementation is ours until `release`.

    Raises UnsupportedModelError with the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        family_of(model.config)
        if model.config._attn_implementation == SEAM:
            raise ConfigError("this model is driven by another runtime: close that one first, or load the model again")
        self.model = model.eval()
        self.config = model.config
        self.dtype = model.dtype
        self.device = model.device
        self.max_positions = int(model.config.max_position_embeddings)
        self.compiled = False
        self._order: tuple[int, ...] = ()
        self._layers: list[nn.Module] = []
        self._separate: Callable[[], None] = lambda: None
        self._previous = model.config._attn_implementation
        AttentionInterface.register(SEAM, _seam)  # type: ignore[arg-type]
        model.set_attn_implementation(SEAM)
        try:
            if model.config._attn_implementation != SEAM:
                raise UnsupportedModelError(f"{self.config.model_type}: attention does not go through the interface")
            self._examine()
        except BaseException:
            self.release()
            raise

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, plan: Attender, out: Tensor | None = None
    ) -> Tensor:
        """One pass over T rows (`token_ids`, `positions`: int64 [T]); float32 logits [len(logit_rows), vocab], in the
        first rows of `out` if given."""
        if self.config._attn_implementation != SEAM:
            raise UnsupportedModelError(
                f"the model's attention was switched to {self.config._attn_implementation!r} while a runtime drives it"
            )
        # compiled, the step must not be among the arguments: it would be guarded, and each would compile anew. So would
        # views: their bases are guarded
        arguments = {} if self.compiled else {"plan": plan}
        if self.compiled:
            token_ids, positions = token_ids.clone(), positions.clone()
        _current.attender, _current.layers = plan, iter(self._order)
        try:
            with torch.inference_mode():
                output = self.model(
                    input_ids=token_ids[None],
                    position_ids=positions[None],
                    attention_mask=None,
                    use_cache=False,
                    logits_to_keep=logit_rows,
                    **arguments,
                )
        finally:
            _current.attender = None
        logits: Tensor = output.logits[0]
        return logits.to(torch.float32) if out is None else out[: len(logits)].copy_(logits)

    def compile(self, backend: str = "inductor") -> None:
        """Let torch.compile fuse the small operations of a layer, at the first steps; one graph serves all layers that
        are alike. Compiled as a whole, a body of 32 layers took minutes."""
        for layer in self._layers:
            layer.compile(dynamic=True, backend=backend)
        self.compiled = True

    def release(self) -> None:
        """Give the model back with the attention implementation it came with."""
        self.model.set_attn_implementation(self._previous)
        self._separate()
        if self.compiled:
            for layer in self._layers:
                layer._compiled_call_impl = None
            self.compiled = False

    def _examine(self) -> None:
        """Learn what each layer stores, join its projections, and require k(p + delta) = R(delta) k(p) and equal values
        on every layer: keys of separate projections against those of joined ones."""
        with seen_inputs(self.model) as calls:
            here = self._probe(0)
        kind, count = self.config.model_type, self.config.num_hidden_layers
        if sorted(here.modules) != list(range(count)):
            raise UnsupportedModelError(f"{kind}: attention was reached in layers {sorted(here.modules)} of {count}")
        self.kv_shapes = tuple(
            KVShape(here.keys[i].shape[1], here.keys[i].shape[2], here.values[i].shape[2]) for i in range(count)
        )
        self.query_heads = tuple(here.query_heads[i] for i in range(count))
        self._order = tuple(here.modules)
        self._layers = _layers_around(self.model, here.modules.values())
        self._separate = join(siblings(self.model, calls))
        self.rope = rope_table(self.config, self.model.base_model, [here.modules[i] for i in range(count)])
        limit = _INVARIANCE_FLOAT if self.dtype in (torch.float32, torch.float64) else _INVARIANCE_HALF
        for delta in sorted({min(37, self.max_positions - 8), self.max_positions - 8}):
            there, tables = self._probe(delta), self.rope.angles([delta], self.device)
            for i in range(count):
                rope = self.rope.layers[i]
                turned = here.keys[i].float()
                if rope is not None:
                    turned = rotate(turned, *tables[rope.frequencies], rope.rotation)
                pairs = (("keys", turned, there.keys[i]), ("values", here.values[i], there.values[i]))
                for name, expected, got in pairs:
                    error = float((expected - got).float().norm() / expected.float().norm().clamp(min=1e-30))
                    if not error <= limit:
                        raise UnsupportedModelError(
                            f"{kind}: {name} of layer {i} do not keep their form when moved by {delta} positions "
                            f"(relative error {error:.2g}, allowed {limit:.2g}); its cached chunks could not be moved"
                        )

    def _probe(self, start: int) -> Probe:
        vocabulary = self.config.vocab_size
        tokens = torch.tensor([(7 + 31 * i) % vocabulary for i in range(8)], device=self.device)
        probe = Probe()
        self.forward(tokens, torch.arange(start, start + 8, device=self.device), tokens[:0], probe)
        return probe
