"""Weights in fp16 slices, kept between calls: the *packs* of fp32 products on tensor cores.

For a product on fp16 slices both operands are split. x is split at every call. The slices of a weight are kept only
where `epigemm.pack(weight)` was called. Every call with that tensor object reads them while they are current: of
functions, layers, and fused models. Any other call reads the weight as it lies, or splits it for itself.

A pack belongs to a tensor object, and is freed with it. It is *stale* once the weight has changed. A stale pack is not
read, and `repack()` (or `pack` again) alone makes it current, in the same memory. Changes are noticed by torch's
version counter, by the weight's storage, and by the steps of torch's optimisers (fused ones do not increase the
counter). They are not noticed if they are made through `weight.data`, by a replayed CUDA graph, or by a collective:
call `repack()` before the next call.

A call for which a gradient of the weight is needed reads no pack, and makes it stale, because the weight is about to
change. A CUDA graph that is captured while the pack is current reads its memory at every replay, also when the weight
has changed since: call `repack()` before a replay.

Imports: `epilogues`, `arguments`, `planner`. Taken by everybody who runs, records or explains a call.
"""
