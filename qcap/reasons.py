"""Why a whole chunk is not in the store: the words of receipts, and what they mean."""

from __future__ import annotations

REASONS = {
    "block-table-unknown": "the engine's blocks of it were not known",
    "edit-not-loaded": "its salt is an edit's, of which not every chunk was loaded (or it was replaced meanwhile), so what was computed is "
    "not the edit's and is not stored under its salt. A prompt that ends with the edit has its last block computed anew: let a token "
    "follow. Else qcap verify URL says whether the edit is whole, and edit.store(ctx) makes it so",
    "host-full": "no host memory was free for its queries: qcap.host_bytes",
    "load-failed": "stored KV could not be loaded (the engine's log says why): what was computed in its place is not stored. Of an edit "
    "that was stored again, the first request that loads all of it is still told so; later ones are not. An engine that runs tries chunks "
    "which failed again after a minute; the edit under another salt it loads at once",
    "lora": "the request used a LoRA adapter",
    "missing-on-a-rank": "another tensor-parallel rank did not store its part",
    "multimodal": "the request had inputs beside text",
    "no-device-memory": "no device memory was free to gather it",
    "no-token-ids": "the prompt had no token ids",
    "not-captured": "its rows did not come by, or capture began later",
    "prefix-cached": "not computed: its rows came from vLLM's prefix cache or were loaded from the store (an edit's, say), so there are no "
    "queries of them; qcap.vllm.recompute_prefix(params) has them computed",
    "ring-full": "no query ring memory was free for it: qcap.q.ring_bytes",
    "rows-missing": "some of its rows never reached the ring",
    "salt": "the request's cache salt cannot be part of a key",
    "store-busy": "the store was slower than capture, and on_pressure is skip",
    "store-failed": "the store could not write it: see the log",
    "streaming": "the request's input came in pieces",
    "token-ids-changed": "the request's token ids changed while it was served",
    "token-ids-unknown": "not all token ids were known at the end",
    "turned-off": "capture of this kind was turned off, by a setting or after an error: see the log",
}


def explain(skipped: dict[str, int]) -> str:
    """``{"kv:load-failed": 4, ...}`` (a receipt's) in words: counts by kind, then each reason's meaning once."""
    counts = ", ".join(f"{reason} {count}" for reason, count in skipped.items())
    named = dict.fromkeys(reason.partition(":")[2] for reason in skipped)
    return f"{counts or 'no reason is known'}" + "".join(f". {name}: {REASONS[name]}" for name in named if name in REASONS)
