"""Whether it is faster to move a half-decoded sample's KV to another process or to compute it there."""

from __future__ import annotations


def is_move_cheaper(
    kv_bytes: int, tokens: int, *, bytes_per_s: float | None, prefill_tokens_per_s: float | None
) -> bool:
    """Whether moving `kv_bytes` of KV takes at most as long as a prefill of the sample's `tokens` tokens.

    `kv_bytes` is known from the sample (`page_runs.used_bytes`). The rates are measured at run time, by the
    target: `bytes_per_s` is `Receiver.bytes_per_s`, over the target's last fetches with the time to connect,
    and `prefill_tokens_per_s` the tokens that the target's prefills computed, over the seconds that its
    timeline has for the activity "prefill". None: not measured yet; then the answer is True, because the
    first move measures the bandwidth, and a host without a prefill has nothing to compare with.
    """
    if bytes_per_s is None or prefill_tokens_per_s is None:
        return True
    return kv_bytes / bytes_per_s <= tokens / prefill_tokens_per_s
