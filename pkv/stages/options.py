"""Stages by name, their options, and the names that other libraries use for the same arguments.

Users of FlashInfer, flash-attn, vLLM, transformers or torch try that library's names first. The error then says what
pkv calls the argument, or that pkv does not have it and what holds instead.
"""

import difflib
import functools
import inspect
from collections.abc import Sequence
from typing import Any

from pkv.plans.gpu import GpuProfile
from pkv.stages import STAGES, Stage
from pkv.wording.checks import MOST_SPLITS, at_least

TAKEN_BY = dict.fromkeys(("scale", "out", "check"), "pkv.run and pkv.decode") | {
    **dict.fromkeys(("window", "soft_cap"), "pkv.plan, pkv.run and pkv.decode"),
    "parts": "pkv.plan, pkv.run and pkv.decode", "stage": "pkv.plan and pkv.decode", "return_lse": "pkv.decode",
    **dict.fromkeys(("splits", "tile", "gpu"), "pkv.plan and pkv.decode, for stages that have it"),
}  # fmt: skip
OURS = {  # other libraries' names for each argument of pkv's
    "scale": "sm_scale softmax_scale scaling attn_scale attention_scale qk_scale scale_factor score_scale bmm1_scale",
    "out": "output o out_tensor attn_output",
    "splits": "num_splits n_splits split num_kv_splits kv_splits max_num_splits num_kv_chunks max_num_partitions",
    "tile": "tile_size block_n BLOCK_N kv_tile_size kv_chunk_size chunk_size",
    "stage": "backend method algorithm kernel_name schedule scheduler strategy",
    "gpu": "gpu_name arch",
    "return_lse": "return_softmax_lse lse return_logsumexp return_lse_base_on_e",
    "window": "window_size window_left sliding_window sliding_window_size local_window_size attention_window",
    "soft_cap": "softcap logits_soft_cap logit_cap attn_logit_softcapping",
}
NONE = {  # names of arguments that pkv does not have, by what holds instead
    "a row's query is its newest token, which sees all cached tokens, so there is nothing to mask: leave it out":
        "causal is_causal",
    "every cached token of a row counts, up to the cache's lengths: mask by a cache with fewer tokens":
        "attn_mask mask attention_mask custom_mask packed_custom_mask key_padding_mask block_mask",
    "scores are scaled, windowed and capped: add such a term in your own kernel, by pkv.Parts(attend_tokens=...)":
        "sinks sink s_aux alibi_slopes use_alibi "
        "attn_bias bias rel_pos_bias score_mod",
    "rotate q and k yourself, before k goes into the cache":
        "rope_scale rope_theta pos_encoding_mode rotary_cos rotary_sin rotary_interleaved rotary_dim rotary_seqlens",
    "the cache has one dtype, that of its pages, which is q's: convert by cache.to(dtype=...)":
        "kv_cache_dtype kv_dtype kv_data_type q_data_type o_data_type data_type dtype out_dtype k_scale v_scale "
        "q_scale o_scale k_descale v_descale q_descale bmm2_scale",
    "the cache holds it: pass it to pkv.PagedKVCache(k_pages, v_pages, block_table, lengths, layout)":
        "k v key value k_cache v_cache key_cache value_cache kv_cache paged_kv_cache kv_data k_pages v_pages "
        "block_table block_tables page_table cache_seqlens seq_lens seqlens context_lens kv_lens kv_seq_lens "
        "seqused_k cache_batch_idx paged_kv_indptr paged_kv_indices paged_kv_last_page_len kv_indptr kv_indices "
        "kv_last_page_len kv_layout layout block_size page_size",
    "it follows from q and the cache: leave it out":
        "enable_gqa num_kv_heads num_q_heads num_heads num_qo_heads n_q_heads n_kv_heads head_dim head_size "
        "max_seq_len max_seqlen_k max_context_len max_kv_len max_seqlen max_sequence_kv device batch_size",
    "there is one query token per row: leave it out":
        "cu_seqlens_q max_seqlen_q qo_indptr q_len_per_req seqused_q max_q_len query_start_loc",
    "decoding drops nothing and keeps no weights: leave it out":
        "dropout_p dropout return_attn_probs return_weights need_weights deterministic training",
    "nothing of the kind is needed: leave it out":
        "use_cuda_graph use_tensor_cores workspace workspace_buffer float_workspace_buffer enable_pdl "
        "scheduler_metadata tmp_output exp_sums max_logits",
}  # fmt: skip
OWN_WORDS = {theirs: ours for ours, words in OURS.items() for theirs in words.split()}
WHAT_HOLDS = {theirs: text for text, words in NONE.items() for theirs in words.split()}


def find_stage(name: str) -> Stage:
    """Return the module of a stage; ValueError lists the known names."""
    if not isinstance(name, str) or name not in STAGES:
        raise ValueError(f"stage = {name!r} does not exist; choose one of {', '.join(STAGES)}")
    return STAGES[name]


@functools.cache
def options_of(stage: str) -> list[str]:
    """Return the options that a stage's plan() takes."""
    parameters = inspect.signature(find_stage(stage).plan).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def checked_options(stage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that are None; raise unless the stage has them and their types are right."""
    known = options_of(stage)
    checked = {}
    for name, value in options.items():
        if name not in known:
            raise unknown_argument(f"stage {stage!r} has no option {name!r}; it has {', '.join(known)}", name, known)
        if value is None:
            continue
        if name in ("splits", "tile"):
            value = at_least(1, name, value)
        if name == "splits" and value > MOST_SPLITS:
            raise ValueError(f"splits = {value} is above {MOST_SPLITS}: a row rarely gains from more than a hundred")
        if name == "dynamic" and not isinstance(value, bool):
            raise TypeError(f"dynamic must be True or False, got {value!r}")
        if name == "gpu" and not isinstance(value, (str, GpuProfile)):
            raise TypeError(f"gpu must be a profile's name or a pkv.GpuProfile, got {value!r}")
        checked[name] = value
    return checked


def unknown_argument(fault: str, name: str, known: Sequence[str]) -> TypeError:
    """Make the error for an argument that a function does not have, with the remedy. known: the arguments it has."""
    if name in WHAT_HOLDS:
        return TypeError(f"{fault}. pkv has no {name}: {WHAT_HOLDS[name]}")
    if name in OWN_WORDS:
        ours = OWN_WORDS[name]
        hint = f". It is called {ours} here"
    else:
        likely = difflib.get_close_matches(name, [*known, *TAKEN_BY], n=1, cutoff=0.75)
        ours = likely[0] if likely else name
        hint = "" if ours == name else f". Did you mean {ours}?"
    if ours not in known and ours in TAKEN_BY:
        hint += f" ({ours} is an argument of {TAKEN_BY[ours]})"
    return TypeError(fault + hint)
