"""Engines: each gives the right result or says why not; what others' libraries are given, by stand-ins for them.

The real libraries are asked where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from types import ModuleType, SimpleNamespace

import fake_flashinfer
import pytest
import torch
from cases import DEVICE, paged, randn

import pkv
from pkv.bench.accuracy import Yardstick
from pkv.bench.engines import (
    flashinfer as engines_flashinfer,
)
from pkv.bench.engines import (
    rivals,
    stream,
)
from pkv.bench.engines import (
    torch as engines_torch,
)
from pkv.bench.engines import (
    triton as engines_triton,
)
from pkv.bench.engines.engine import Batch
from pkv.bench.engines.registry import DEFAULT_ENGINES, ENGINES, find_engines
from pkv.bench.engines.triton import sglang_splits
from pkv.bench.loads.batches import poisoned_batch
from pkv.cards.known import gpu_of, load_gpu
from pkv.kernels.uploads import UPLOADS
from pkv.plans.gpu import GpuProfile
from pkv.stages import x_flashinfer

CPU = torch.device("cpu")
TOY = pkv.Shape(8, 2, 64, 16, "float16")
ODD = pkv.Shape(8, 2, 80, 16, "float16")  # no kernel of FlashInfer has this head_dim
RAGGED = [100, 37, 16, 250, 1]
FULL = pkv.Shape(32, 8, 128, 16, "float16")
FLASHINFER = ["fa2-tensor-core", "fa2-cuda-core", "fa3", "batch-attention", "xqa"]


def batch_of(lengths, shape=TOY, gpu="rtx3060", device=CPU):
    q, cache = poisoned_batch(lengths, shape, 0, device, unused=1000.0)
    return Batch(q, cache, lengths, shape, load_gpu(gpu) if device == CPU else gpu_of(device))


def one(name):
    (engine,) = find_engines([name])
    return engine


def result_of(engine, batch):
    ready = engine.prepare(batch)
    return ready, ready.run(ready.plan())


def assert_right(engine, batch):
    ready, (out, lse) = result_of(engine, batch)
    yardstick = Yardstick(batch.q, batch.cache)
    accuracy = yardstick.measure(out, yardstick.lse if lse is None else lse, ready.rounds_weights)
    assert accuracy.ok, f"{engine.name}: {accuracy}"
    return ready


@pytest.fixture(autouse=True)
def where_it_belongs(request):
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        pytest.skip("stand-ins and the interpreter: run where no GPU is visible")


@pytest.mark.parametrize("name", [*ENGINES, "workqueue:splits=2,tile=32", "row_local:splits=3", "split_kv:tile=64"])
def test_an_engine_is_right_or_says_why_not(name):
    engine, batch = one(name), batch_of(RAGGED)
    reason = engine.why_not(batch)
    if reason is not None:
        assert len(reason) > 20
        assert name.split(":")[0] in [*FLASHINFER, "adaptive", "flashinfer", "vllm", *engines_triton.SGLANG_CAPS]
        return
    ready, (out, lse) = result_of(engine, batch)
    if ready.check is None:
        assert_right(engine, batch)
        assert out.shape == batch.q.shape
        assert (lse is None) == (engine.family != "pkv")
    else:
        assert ready.check((out, lse)).ok


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", DEFAULT_ENGINES)
def test_an_engine_is_right_on_a_gpu(name, page_size):
    shape = dataclasses.replace(FULL, page_size=page_size)
    engine, batch = one(name), batch_of([16384, 900, 1, 4096, 63, 64], shape, device=DEVICE)
    reason = engine.why_not(batch)
    if reason is not None:
        pytest.skip(reason)
    ready, result = result_of(engine, batch)
    assert ready.check(result).ok if ready.check else assert_right(engine, batch)


@pytest.mark.parametrize("name", ["reference", "split_kv", "length_buckets", "row_local", "workqueue"])
@pytest.mark.parametrize("lengths", [[5, 0, 40], [0, 0], []], ids=str)
def test_our_engines_take_empty_rows(name, lengths):
    batch = batch_of(lengths)
    assert one(name).why_not(batch) is None
    assert_right(one(name), batch)


@pytest.mark.parametrize("name", ["adaptive", "adaptive:policy=cost"])
def test_adaptive_runs_what_it_chose_and_says_what(name):
    batch = batch_of([40, 7], ODD)
    ready = assert_right(one(name), batch)
    assert (
        ready.settings["stage"] == pkv.plan([40, 7], ODD, "adaptive", gpu="rtx3060", policy=name[16:] or "paper").stage
    )


def test_adaptive_does_not_pass_its_fallback_off_as_its_choice():
    assert "it chose flashinfer, and FlashInfer needs a CUDA GPU" in one("adaptive").why_not(batch_of(RAGGED))


def test_cost_needs_a_card_with_costs():
    batch = dataclasses.replace(batch_of([40], ODD), gpu=GpuProfile("unmeasured", 90, 132))
    assert "'unmeasured' has no costs" in one("adaptive:policy=cost").why_not(batch)


def test_a_plan_of_the_host_is_made_once_a_step_and_run_for_every_layer(monkeypatch):
    from pkv.bench.engines import pkv as engines_pkv

    made = []
    plan_step = engines_pkv.plan_step
    monkeypatch.setattr(engines_pkv, "plan_step", lambda *a, **k: made.append(k) or plan_step(*a, **k))
    ready = one("workqueue:splits=20").prepare(batch_of([40, 7]))
    made.clear()
    planned = ready.plan()
    assert [(k["stage"], k["splits"], k["gpu"].name) for k in made] == [("workqueue", 20, "rtx3060")]
    assert CPU in UPLOADS.known(planned), "its arrays are where the kernels read them before the first layer"
    ready.run(planned)
    ready.run(planned)
    assert len(made) == 1
    assert one("row_local").prepare(batch_of([40])).plan() is None


def test_a_stage_that_cannot_do_a_shape_says_so():
    wide = pkv.Shape(2, 1, 1024, 16, "float16")
    assert "head_dim = 1024 is above" in one("row_local").why_not(batch_of([5], wide))
    assert "head_dim" in one("workqueue").why_not(batch_of([5], wide))


def test_the_reference_is_not_timed_on_a_gpu():
    batch = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda")))
    assert "specification" in one("reference").why_not(batch)
    assert set(ENGINES) - set(DEFAULT_ENGINES) == {"reference", "empty"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "engine 'nothing' does not exist; choose of reference, split_kv,"),
        ("", "does not exist"),
        ("vllm:splits=2", "vllm takes no options"),
        ("workqueue:", "'' is no option of it; workqueue takes splits=VALUE, tile=VALUE, ordering=VALUE"),
        ("workqueue:splits", "'splits' is no option"),
        ("workqueue:splits=", "'splits=' is no option"),
        ("workqueue:slits=2", "'slits=2' is no option"),
        ("workqueue:gpu=h200", "'gpu=h200' is no option"),
        ("row_local:dynamic=1", "'dynamic=1' is no option"),
        ("reference:splits=2", "reference takes no options"),
        ("workqueue:splits=2,splits=3", "splits is given twice"),
        ("workqueue:splits=0", "splits = 0 is too small"),
        ("workqueue:splits=-1", "splits must be an int"),
        ("workqueue:tile=17", "17"),
        ("workqueue:ordering=random", "ordering = 'random' does not exist"),
        ("adaptive:policy=cheap", "policy = 'cheap' does not exist"),
        ("flashinfer:kernel=fast", "fast"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name, words):
    with pytest.raises(ValueError, match="engine") as caught:
        find_engines([name])
    assert words in str(caught.value)
    assert repr(name) in str(caught.value)


def test_names_are_found_in_order_and_once():
    names = ["vllm", "workqueue:tile=32,splits=20", "adaptive:policy=cost", "flashinfer:kernel=cuda-core", "stream"]
    found = [engine.name for engine in find_engines(names)]
    assert found == [names[0], "workqueue:splits=20,tile=32", *names[2:]]
    assert find_engines([]) == []
    with pytest.raises(ValueError, match="'workqueue:splits=20,tile=32' is named twice"):
        find_engines([names[1], "workqueue:splits=20,tile=32"])
    with pytest.raises(TypeError, match="got one str"):
        find_engines("vllm")


# gather-sdpa


def test_gather_never_follows_an_unused_entry_of_the_table():
    k, v = randn(3, 40, 2, 64, seed=1, dtype=torch.float16), randn(3, 40, 2, 64, seed=2, dtype=torch.float16)
    q = randn(3, 8, 64, dtype=torch.float16)
    for layout, page_size in (("NHD", 16), ("HND", 16), ("NHD", 1), ("NHD", 48)):
        shape = dataclasses.replace(TOY, page_size=page_size)
        cache = paged(k, v, [40, 1, 17], page_size, poison=1000.0, layout=layout, spare_columns=0).to(CPU)
        assert_right(one("gather-sdpa"), Batch(q, cache, [40, 1, 17], shape, load_gpu("rtx3060")))


def test_gather_refuses_a_copy_above_4_gb():
    batch = dataclasses.replace(batch_of([5], FULL), lengths=[131072] + [16] * 6)
    assert one("gather-sdpa").why_not(batch) is None
    assert engines_torch.dense_bytes(batch) == 7 * 131072 * 4096
    batch.lengths.append(16)
    assert "4.3 GB, more than the 4 GB allowed" in one("gather-sdpa").why_not(batch)


@pytest.mark.parametrize("name", ["gather-sdpa", *FLASHINFER, "sglang"])
def test_others_refuse_rows_without_tokens(name, monkeypatch):
    pretend_to_be_there(monkeypatch)
    assert one(name).why_not(batch_of([5, 40], gpu="h200")) is None
    assert "row 1 has no tokens" in one(name).why_not(batch_of([5, 0, 40], gpu="h200"))
    assert "no row" in one(name).why_not(batch_of([], gpu="h200"))


# stream


@pytest.mark.parametrize("lengths", [[1], [16], [100, 37, 16, 250, 1], [33, 0], [1000]], ids=str)
def test_stream_reads_as_many_bytes_and_no_more(lengths):
    batch = batch_of(lengths)
    ready, result = result_of(one("stream"), batch)
    assert ready.check(result).ok
    n_words = batch.kv_bytes // 2 // 4
    for pages in (batch.cache.k_pages, batch.cache.v_pages):
        words = pages.view(-1).view(torch.int32)
        for word, is_read in ((0, True), (n_words - 1, True), (n_words, False)):
            words[word] += 1
            assert ready.check(ready.run(None)).ok
            after = int(ready.run(None)[0].sum())
            words[word] -= 1
            assert (after - int(ready.run(None)[0].sum())) % 2**32 == is_read


def test_stream_is_refuted_by_one_bit():
    batch = batch_of([70])
    ready, result = result_of(one("stream"), batch)
    batch.cache.v_pages.view(-1).view(torch.int32)[1000] ^= 1
    accuracy = ready.check(result)
    assert not accuracy.ok
    assert accuracy.max_err == 1


def test_stream_takes_a_pool_that_the_tokens_fill():
    batch = batch_of([2 * TOY.page_size])
    pools = (pages[:2] for pages in (batch.cache.k_pages, batch.cache.v_pages))
    full = pkv.PagedKVCache(*pools, torch.tensor([[0, 1]], dtype=torch.int32), batch.cache.lengths)
    assert one("stream").why_not(dataclasses.replace(batch, cache=full)) is None


def test_stream_refuses_what_is_not_there():
    assert "no tokens" in one("stream").why_not(batch_of([0]))
    batch = batch_of([40])
    assert "rows share pages" in one("stream").why_not(dataclasses.replace(batch, lengths=[40, 40, 40, 40]))
    table, lengths = batch.cache.block_table, batch.cache.lengths
    strided = pkv.PagedKVCache(batch.cache.k_pages[:, ::2], batch.cache.v_pages[:, ::2], table, lengths // 2)
    assert "k_pages is not one piece" in one("stream").why_not(dataclasses.replace(batch, cache=strided))


def test_the_configurations_of_stream_fill_a_gpu_without_exceeding_it():
    assert len(stream.CONFIGS) > 10
    for config in stream.CONFIGS:
        assert 8 <= config.warps * config.programs_per_sm <= 64
        assert config.block % (4 * 32 * config.warps) == 0, "every thread loads 16 bytes at once"


# FlashInfer


def pretend_to_be_there(monkeypatch):
    """All libraries are there, and the CPU is a GPU."""
    library = fake_library()
    monkeypatch.setattr(x_flashinfer, "imported", lambda: library)
    monkeypatch.setattr(x_flashinfer, "unavailable", lambda: None)
    monkeypatch.setattr(engines_flashinfer, "not_on_gpu", lambda batch: None)
    monkeypatch.setattr(engines_triton, "vllm", lambda: fake_unified_attention)
    monkeypatch.setattr(engines_triton, "sglang", lambda: fake_decode_attention)
    return library


def attend(q, k_pages, v_pages, page_ids, length):
    """One row in fp32: q [n_q_heads, head_dim], pages in NHD order."""
    k, v = (x[page_ids.long()].flatten(0, 1)[:length].float() for x in (k_pages, v_pages))
    k, v = (x.repeat_interleave(len(q) // k.shape[1], dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,thd->ht", q.float(), k) / math.sqrt(q.shape[-1]), dim=-1)
    return torch.einsum("ht,thd->hd", weights, v)


class Wrapper(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    """Asked for no lse; without sm_scale it takes 1 / sqrt(head_dim)."""

    def plan(self, *args, **kwargs):
        assert all(x.device == CPU for x in (args[0], args[2])), "it plans on the host"
        super().plan(*args, sm_scale=1 / math.sqrt(args[5]), **kwargs)

    def run(self, q, pages, *, out):
        return super().run(q, pages, out=out, return_lse=True)[0]


class BatchAttention:
    def __init__(self, kv_layout="NHD", device="cuda"):
        self.layout, self.device = kv_layout, device

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
        page_size, causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16, use_profiler=False,
    ):  # fmt: skip
        numbers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert {x.dtype for x in numbers} == {torch.int32}
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1)), "one query token per row"
        self.ends, self.indices, self.lengths = kv_indptr.tolist(), kv_indices, kv_len_arr.tolist()
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, q_data_type, kv_data_type)

    def run(self, q, kv_cache, out=None, lse=None):
        k, v = kv_cache
        assert self.sizes == (q.shape[1], k.shape[2], q.shape[2], v.shape[3], k.shape[1], q.dtype, k.dtype)
        assert lse.shape == q.shape[:2]
        assert lse.dtype == torch.float32
        for row, length in enumerate(self.lengths):
            out[row] = attend(q[row], k, v, self.indices[self.ends[row] : self.ends[row + 1]], length)
        return out, lse


def xqa_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
    window_left=-1, out=None, sinks=None, kv_layout="NHD",
):  # fmt: skip
    assert not workspace_buffer.any(), "its semaphores begin at 0"
    assert (workspace_buffer.dtype, seq_lens.dtype, block_tables.dtype) == (torch.uint8, torch.int32, torch.int32)
    assert math.isclose(bmm1_scale * math.sqrt(query.shape[-1]), 1)
    assert (bmm2_scale, kv_layout) == (1.0, "NHD")
    assert max_seq_len == block_tables.shape[1] * kv_cache[0].shape[1]
    for row, length in enumerate(seq_lens.tolist()):
        out[row] = attend(query[row], *kv_cache, block_tables[row, : -(-length // kv_cache[0].shape[1])], length)
    return out


def fake_library():
    decode = SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache)
    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchAttention=BatchAttention, decode=decode, __version__="0"
    )


@pytest.mark.parametrize("name", FLASHINFER)
@pytest.mark.parametrize("lengths", [RAGGED, [16, 32], [15]], ids=str)
def test_what_flashinfer_is_given(name, lengths, monkeypatch):
    pretend_to_be_there(monkeypatch)
    monkeypatch.setattr(Wrapper, "made", [])
    batch = batch_of(lengths, gpu="h200")
    assert one(name).why_not(batch) is None
    ready = assert_right(one(name), batch)
    ready.run(ready.plan())  # a second step with the same wrapper
    expected = {"fa2-tensor-core": [(True, "fa2")], "fa2-cuda-core": [(False, "fa2")], "fa3": [(True, "fa3")]}
    assert [(wrapper.use_tensor_cores, wrapper.backend) for wrapper in Wrapper.made] == expected.get(name, [])


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("fa2-tensor-core", {"head_dim": 80}, "head_dim of 64, 128 or 256, not 80"),
        ("fa2-cuda-core", {"n_q_heads": 10}, "query heads per KV head, not 5"),
        ("batch-attention", {"dtype": torch.float32, "kv_dtype": torch.float32}, "float16 or bfloat16, not float32"),
        ("xqa", {"page_size": 8}, "pages of 16, 32, 64 or 128 tokens, not 8"),
        ("xqa", {"head_dim": 40}, "head_dim of 16, 32, ... 256, not 40"),
        ("xqa", {"n_q_heads": 66}, "up to 32 query heads per KV head, not 33"),
        ("vllm", {"page_size": 8}, "a multiple of 16 tokens, not 8"),
        ("vllm", {"head_dim": 16}, "head_dim of 32 or more"),
        ("sglang", {"dtype": torch.float32, "kv_dtype": torch.float32}, "float16 or bfloat16"),
    ],
)
def test_limits_of_others(name, changed, words, monkeypatch):
    pretend_to_be_there(monkeypatch)
    assert one(name).why_not(batch_of([40, 7], gpu="h200")) is None
    assert words in one(name).why_not(batch_of([40, 7], dataclasses.replace(TOY, **changed), gpu="h200"))


def test_cards_that_others_are_not_built_for(monkeypatch):
    library = pretend_to_be_there(monkeypatch)
    ampere = batch_of([40])
    assert "9.0, and this GPU has 8.6" in one("fa3").why_not(ampere)
    assert "this GPU has 8.6" in one("xqa").why_not(ampere)
    assert one("fa2-tensor-core").why_not(ampere) is None
    blackwell = dataclasses.replace(ampere, gpu=GpuProfile("b", 100, 148))
    assert one("xqa").why_not(blackwell) is None
    assert "9.0, and this GPU has 10.0" in one("fa3").why_not(blackwell)
    del library.BatchAttention
    assert "no BatchAttention" in one("batch-attention").why_not(ampere)
    library.decode = SimpleNamespace()
    assert "no xqa" in one("xqa").why_not(blackwell)


def test_layouts_that_others_cannot_read(monkeypatch):
    pretend_to_be_there(monkeypatch)
    batch = batch_of([40, 7], gpu="h200")
    cache = batch.cache
    padded = torch.zeros(*cache.v_pages.shape[:2], 3, 64, dtype=torch.float16)[:, :, :2]
    unequal = pkv.PagedKVCache(cache.k_pages, padded, cache.block_table, cache.lengths)
    unequal = dataclasses.replace(batch, cache=unequal)
    for name in ("xqa", "fa2-cuda-core"):
        assert "equal strides" in one(name).why_not(unequal)
    assert one("fa2-tensor-core").why_not(unequal) is None
    heads_first = (x.transpose(1, 2).contiguous() for x in (cache.k_pages, cache.v_pages))
    heads_first = pkv.PagedKVCache(*heads_first, cache.block_table, cache.lengths, layout="HND")
    assert "list of them, as in layout NHD" in one("sglang").why_not(dataclasses.replace(batch, cache=heads_first))
    queries = torch.zeros(2, 8, 128, dtype=torch.float16)[:, :, :64]
    assert "q is not contiguous" in one("xqa").why_not(dataclasses.replace(batch, q=queries))


# vLLM and SGLang


def fake_unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None,
    softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None,
):  # fmt: skip
    n_rows, n_q_heads, head_dim = q.shape
    assert cu_seqlens_q.tolist() == list(range(n_rows + 1))
    assert (max_seqlen_q, causal, window_size, softcap) == (1, True, (-1, -1), 0)
    assert math.isclose(softmax_scale * math.sqrt(head_dim), 1)
    assert (seq_threshold_3D, num_par_softmax_segments) == (128 // k.shape[2], 16)
    assert softmax_segm_output.shape == (seq_threshold_3D, n_q_heads, 16, 2 ** math.ceil(math.log2(head_dim)))
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == (seq_threshold_3D, n_q_heads, 16)
    page_size = k.shape[1]
    for row, length in enumerate(seqused_k.tolist()):
        n_read = -(-length // 32) * 32 // page_size  # it reads the page ids of a whole tile
        assert block_table[row, :n_read].numel() == n_read
        if length:
            out[row] = attend(q[row], k, v, block_table[row, : -(-length // page_size)], length)


def fake_decode_attention(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits, sm_scale,
    k_scale, v_scale,
):  # fmt: skip
    assert attn_logits.shape == (*q.shape[:2], max_kv_splits, q.shape[2])
    assert attn_lse.shape == attn_logits.shape[:3]
    assert {x.dtype for x in (attn_logits, attn_lse)} == {torch.float32}
    assert (kv_indices.dtype, num_kv_splits.dtype) == (torch.int64, torch.int32), "int32 would overflow in the kernel"
    assert 1 <= num_kv_splits.min() <= num_kv_splits.max() <= max_kv_splits
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert math.isclose(sm_scale * math.sqrt(q.shape[2]), 1)
    for row in range(len(q)):
        slots = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
        o[row] = attend(q[row], k_buffer[:, None], v_buffer[:, None], slots, len(slots))


@pytest.mark.parametrize("name", ["vllm", *engines_triton.SGLANG_CAPS])
@pytest.mark.parametrize("page_size", [16, 32])
def test_what_the_triton_kernels_are_given(name, page_size, monkeypatch):
    pretend_to_be_there(monkeypatch)
    batch = batch_of(RAGGED, dataclasses.replace(TOY, page_size=page_size))
    assert one(name).why_not(batch) is None
    ready = assert_right(one(name), batch)
    assert ready.settings.get("cap") == engines_triton.SGLANG_CAPS.get(name)


def test_vllm_may_read_the_page_ids_of_a_whole_tile(monkeypatch):
    pretend_to_be_there(monkeypatch)
    k, v = randn(2, 16, 2, 64, seed=1, dtype=torch.float16), randn(2, 16, 2, 64, seed=2, dtype=torch.float16)
    cache = paged(k, v, [16, 5], poison=1000.0, spare_columns=0).to(CPU)
    assert cache.max_pages == 1
    assert_right(one("vllm"), Batch(randn(2, 8, 64, dtype=torch.float16), cache, [16, 5], TOY, load_gpu("h200")))


def test_vllm_takes_no_empty_rows(monkeypatch):
    """Its kernel leaves such a row of the result as it is, whatever that held."""
    pretend_to_be_there(monkeypatch)
    assert "row 1 has no tokens" in one("vllm").why_not(batch_of([5, 0, 40]))
    assert "no row" in one("vllm").why_not(batch_of([]))


def test_vllm_cuts_rows_while_there_are_few(monkeypatch):
    pretend_to_be_there(monkeypatch)
    heads = pkv.Shape(8, 8, 64, 16, "float16")
    for n_rows, segments in ((16, 16), (17, 1)):
        assert one("vllm").prepare(batch_of([1] * n_rows, heads)).settings["segments"] == segments


@pytest.mark.parametrize(
    ("lengths", "n_sms", "cap", "splits"),
    [
        ([16384], 132, 8, [8]),
        ([16384], 132, 64, [64]),
        ([16384, 16384], 28, 64, [14, 14]),  # 28 SMs x log2(16384 / 64) = 224 places, 2 rows x 8 programs
        ([4096] * 8, 28, 64, [3] * 8),  # 168 places, 64 programs
        ([4096] * 256, 132, 8, [1] * 256),
        ([16384, 1024], 1, 64, [16, 1]),  # 16 times as long, so 16 times the splits, however full the GPU is
        ([100, 85], 1, 64, [1, 1]),  # about equal
        ([100, 60], 1, 64, [2, 2]),
        ([30], 10, 64, [2]),  # short rows: no fewer places than SMs
    ],
)
def test_sglang_splits(lengths, n_sms, cap, splits):
    assert sglang_splits(lengths, FULL, n_sms, cap) == splits


def test_sglang_counts_programs_by_heads():
    assert sglang_splits([16384], pkv.Shape(8, 8, 128, 16, "float16"), 28, 64) == [28]  # a head each
    assert sglang_splits([16384], pkv.Shape(64, 1, 128, 16, "float16"), 28, 64) == [56]  # 16 heads each


# rivals


def test_an_entry_point_is_found_or_the_reason_said(monkeypatch):
    find = rivals.entry_point.__wrapped__
    assert find("inspect", "signature", "obj", "Inspect") is inspect.signature
    assert find("inspect", "signature", "cap", "Inspect") == (
        "this version of Inspect has another signature: it takes no cap"
    )
    assert "fails (AttributeError: module" in find("inspect", "attend", "cap", "Inspect")
    missing = find("no_such_package.kernels", "attend", "cap", "Nobody")
    assert missing == "Nobody is not installed: pip install no_such_package, or put its kernels on PYTHONPATH"
    monkeypatch.setitem(sys.modules, "half_a_package", ModuleType("half_a_package"))
    assert "fails (ModuleNotFoundError" in find("half_a_package.kernels", "attend", "cap", "Half")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_library_is_a_reason(name, monkeypatch):
    monkeypatch.setattr(engines_triton, "entry_point", rivals.entry_point.__wrapped__)
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError
    assert f"{name}" in one(name).why_not(batch_of([5]))


def test_staging_brings_new_numbers_each_time():
    room = rivals.staging(3, CPU)
    first = room.send([1, 2, 3])
    assert first.tolist() == [1, 2, 3]
    assert first.dtype == torch.int32
    assert room.send([4, 5, 6]) is first
    assert first.tolist() == [4, 5, 6]
