"Traces of any size as torch.profiler writes them: `python tests/trace_files.py OUT.json[.gz] --megabytes 500`."
import argparse
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BASE = 1_764_547_200_000_000_000  # ns that Kineto's times are counted from
HEADER = dict(
    schemaVersion=1,
    deviceProperties=[dict(id=0, name="NVIDIA H100 80GB HBM3", totalGlobalMem=85_017_493_504, computeMajor=9, computeMinor=0, warpSize=32, numSms=132)],
    distributedInfo=dict(backend="nccl", rank=3, world_size=8, pg_count=1, pg_config=[dict(pg_name="0", pg_desc="default_pg", pg_size=8, ranks=list(range(8)))]))
FOOTER = dict(traceName="rank3.json", displayTimeUnit="ms", baseTimeNanoseconds=BASE)

# How each writer puts an event: Kineto up to torch 2.12 and since 2.13, json.dumps, and json.dumps with the tightest separators.
LAYOUTS = ["kineto", "kineto lines", "dumps", "compact"]

def fused(words): return [f"triton_{kind}_fused_{word}_{i}" for i, word in enumerate(words) for kind in ("poi", "red")]


OPERATORS = [f"aten::{name}" for name in (
    "add add_ addmm arange argmax as_strided baddbmm bitwise_and bmm cat clamp clone contiguous copy_ cumsum div div_ embedding empty empty_like empty_strided eq expand fill_ flatten ge gt index index_put_ "
    "index_select item linear lt masked_fill_ matmul max mean mm mul mul_ narrow ne neg new_empty ones permute pow reshape resize_ rsqrt scatter_ select sigmoid silu slice softmax sort split squeeze stack sub sum t "
    "to topk transpose unbind unsqueeze view where zero_ zeros _local_scalar_dense _reshape_alias _softmax _to_copy _unsafe_view").split()]
OPERATORS += [f"{space}::{name}" for space, names in {
    "_C": "rms_norm fused_add_rms_norm rotary_embedding silu_and_mul per_token_group_fp8_quant", "_moe_C": "grouped_topk moe_align_block_size moe_sum topk_softmax", "_C_cache_ops": "concat_and_cache_mla",
    "vllm": "all_reduce all_gather inplace_fused_experts moe_forward_shared unified_mla_attention_with_output mla_rope maybe_calc_kv_scales"}.items() for name in names.split()]
OTHER_CALLS = [f"cuda{name}" for name in "StreamIsCapturing EventRecord StreamGetCaptureInfo_v2 OccupancyMaxActiveBlocksPerMultiprocessor EventQuery PeekAtLastError GetDevice FuncGetAttributes StreamWaitEvent".split()]
LAUNCHES = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx"]
ALL_REDUCE, ALL_GATHER = (f"ncclDevKernel_{what}_RING_LL(ncclDevKernelArgsStorage<4096ul>)" for what in ("AllReduce_Sum_bf16", "AllGather"))
NORM = "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long, c10::BFloat16*, c10::BFloat16 const*, float, int, int)"
SILU = "void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>(c10::BFloat16 const&)), true>(c10::BFloat16*, c10::BFloat16 const*, int)"
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>, 4>(int, std::array<char*, 2ul>)"
MLA = {  # kernels of a layer's attention -> us
    "prefill": [("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> > > > > >(flash::Params)", 90)],
    "decode": [("void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8, cutlass::bfloat16_t, 512>, true, SharedStorageMLA>(Flash_fwd_mla_params)", 14),
               ("void flash_fwd_splitkv_mla_combine_kernel<cutlass::bfloat16_t, float, long, 512, 32>(Flash_fwd_mla_params)", 3)]}
START = [(COPY, 2)] * 2 + [("_compute_slot_mapping_kernel", 2), ("void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)", 3)]
CHOOSE = [(COPY, 2), ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, 4, 4> >(at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, 4, 4>)", 14)]
FUSED = fused(["_to_copy_add_mean_mul_pow_rsqrt", "mul_silu_split", "cat_index_select", "add_clone_view", "_unsafe_view_copy_slice", "constant_pad_nd", "sigmoid_where"])


def layer(kind, number):
    "The kernels of one layer in their order, and how many us each takes. A kernel in sixteen or so is chosen otherwise in other layers, as autotuning does."
    def gemm(m, n, us): return f"nvjet_tst_{m}x{8 if kind == 'decode' else 128}_64x{n}_{1 + number % 3}x1_v_bz_TNT", us
    return [
        (NORM, 2.5), gemm(64, 16, 9), ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*, c10::BFloat16 const*, float, int)", 2), gemm(128, 12, 8),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, false>(long const*, c10::BFloat16*, c10::BFloat16*, c10::BFloat16 const*, int, long, long, long, int, int, int, long)", 2),
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(__nv_bfloat16 const*, __nv_bfloat16 const*, __nv_bfloat16*, long const*, int, int, int, int, int, int, float const*)", 2),
        gemm(192, 10, 4), *MLA[kind], gemm(96, 14, 4), gemm(256, 8, 8), (ALL_REDUCE, 11),
        (NORM, 2.5), gemm(32, 20, 5), ("void vllm::moe::grouped_topk_fused_kernel<float, float, int, (vllm::moe::ScoringFunc)1>(float*, float*, int*, float const*, long, long, long, long, bool, double)", 4),
        ("void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int, int, int, int, unsigned long, int*, int)", 4), (FUSED[number % len(FUSED)], 2),
        ("fused_moe_kernel", 38), (SILU, 2), ("fused_moe_kernel", 24), ("void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16 const*, int)", 3), gemm(80, 18, 6), (SILU, 2), gemm(112, 16, 5), (ALL_REDUCE, 12)]


def template(event, layout):
    "One event as `layout` writes it; values are texts and may hold placeholders."
    def plain(value): return value if isinstance(value, str) else json.dumps(value)
    def pairs(items, colon, comma): return comma.join(f'"{key}"{colon}{value}' for key, value in items)
    head, args = [(key, plain(value)) for key, value in event.items() if key != "args"], event.get("args")
    if layout in ("dumps", "compact"):
        colon, comma = (": ", ", ") if layout == "dumps" else (":", ",")
        inner = f'{comma}"args"{colon}{{{pairs([(key, plain(v)) for key, v in args.items()], colon, comma)}}}' if args else ""
        return f"{{{pairs(head, colon, comma)}{inner}}}{comma}"
    inner = f',\n    "args": {{\n      {pairs([(key, plain(v)) for key, v in args.items()], ": ", ", ")}\n    }}' if args else ""
    if layout == "kineto lines": return f"\n  {{\n    {pairs(head, ': ', ',' + chr(10) + '    ')}\n    {inner}\n  }},"
    at = max(1, [key for key, _ in head].index("ts" if event["ph"] == '"X"' else "cat"))
    return f"\n  {{\n    {pairs(head[:at], ': ', ', ')},\n    {pairs(head[at:], ': ', ', ')}{inner}\n  }},"


@dataclass
class Template:
    "All events of a step as one text with a %d for each number, and where the numbers come from."
    kind: str
    text: str
    numbers: np.ndarray  # for each %d: which of the step's numbers, as `numbers_of` lays them out
    usual: np.ndarray  # us that each event of the GPU takes
    launch: np.ndarray  # the moment of the CPU that launches it
    moments: int  # of the CPU
    forward: int  # the moment at which the forward pass is launched
    passes: slice  # events of the GPU in the forward pass
    ids: int
    kernels: int
    all_reduces: int


CPU, GPU = dict(pid=4037, tid=4037), dict(pid=0, tid=7)


def template_of(kind, layers, graphs, layout, random):
    """A step in a serving trace's proportions of events: about 35 % operators, 20 % calls, 30 % arrows, 10 % kernels.
    With graphs the forward pass is one launch, and other calls stand where its launches were."""
    events, wants, launch, usual, count = [], [], [], [], dict(id=0, moment=0, message=0)
    def new(what):
        count[what] += 1
        return count[what] - 1
    texts = {}
    def span(cat, name, place, moment, numbers, **args):  # `moment` is ("cpu", 5): the fifth one there, which has a start and a length
        if (cat, name) not in texts: texts[cat, name] = template(dict(ph='"X"', cat=json.dumps(cat), name=json.dumps(name), **place, ts="%d.%03d", dur="%d.%03d", args=args), layout)
        events.append(texts[cat, name])
        wants.extend((moment[0] + what, part, moment[1]) for what in (" start", " length") for part in (0, 1))
        wants.extend(numbers)
    def arrow(ph, place, moment, number):
        if (ph, moment[0]) not in texts: texts[ph, moment[0]] = template(dict(ph=f'"{ph}"', id="%d", **place, ts="%d.%03d", cat='"ac2g"', name='"ac2g"', **({"bp": '"e"'} if ph == "f" else {})), layout)
        events.append(texts[ph, moment[0]])
        wants.extend([number, *((moment[0] + " start", part, moment[1]) for part in (0, 1))])
    def one_id(): return "id", 0, new("id")
    def call(name, own):
        moment = "cpu", new("moment")
        span("cuda_driver" if name.startswith("cuL") else "cuda_runtime", name, CPU, moment, [one_id(), own], **{"External id": "%d", "cbid": 211, "correlation": "%d"})
        return moment
    def operators(n):
        for name in random.choice(OPERATORS, n).tolist(): span("cpu_op", name, CPU, ("cpu", new("moment")), [(number := one_id()), number], **{"External id": "%d", "Ev Idx": "%d"})
    def on_gpu(cat, name, us, moment, numbers, **args):
        launch.append(moment[1])
        usual.append(us)
        span(cat, name, GPU, at := ("gpu", len(usual) - 1), numbers, **args)
        arrow("f", GPU, at, numbers[1])
    def kernel(name, us, of_graph=None):
        operators(4)
        own = of_graph[1] if of_graph else one_id()
        moment = call(OTHER_CALLS[random.integers(len(OTHER_CALLS))] if of_graph else LAUNCHES[len(name) % 3], one_id() if of_graph else own)
        arrow("s", CPU, moment, own)
        other = call(OTHER_CALLS[random.integers(len(OTHER_CALLS))], number := one_id())
        for ph in "sf"[len(usual) % 2:]: arrow(ph, CPU, other, number)
        reduced, message = name == ALL_REDUCE, {}
        if name.startswith("nccl"):
            message = {"Collective name": '"allreduce"' if reduced else '"_allgather_base"', "In msg nelems": 7168 if reduced else 20480, "Out msg nelems": 7168 if reduced else 163840, "Group size": 8, "dtype": '"BFloat16"', "In split size": '"[]"',
                       "Out split size": '"[]"', "Process Group Name": '"0"', "Process Group Description": '"default_pg"', "Process Group Ranks": '"[0, 1, 2, 3, 4, 5, 6, 7]"', "Seq": "%d"}
        on_gpu("kernel", name, us if kind == "decode" else 6 * us, of_graph[0] if of_graph else moment, [one_id(), own] + [("message", 0, new("message"))] * bool(message), **{
            "External id": "%d", "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": "%d", "registers per thread": 64, "grid": [512, 1, 1], "block": [256, 1, 1]}, **message)
    def copy(cat, name, call_name):
        own = one_id()
        on_gpu(cat, name, 2, call(call_name, own), [one_id(), own], **{"External id": "%d", "device": 0, "context": 1, "stream": 7, "correlation": "%d", "bytes": 4096, "memory bandwidth (GB/s)": 0.786})
    name = "execute_context_0(0)_generation_4(4)" if kind == "decode" else "execute_context_1(512)_generation_0(0)"
    span("user_annotation", name, CPU, ("cpu", new("moment")), [(number := one_id()), number], **{"External id": "%d", "Record function id": 0, "Ev Idx": "%d"})
    for _ in range(2): copy("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "cudaMemcpyAsync")
    copy("gpu_memset", "Memset (Device)", "cudaMemsetAsync")
    first = len(usual)
    for pair in START: kernel(*pair)
    graph = (call("cudaGraphLaunch", own := one_id()), own) if graphs and kind == "decode" else None
    for number in range(layers):
        for pair in layer(kind, number): kernel(*pair, graph)
    kernel(NORM, 2.5, graph)
    forward, last = count["moment"], len(usual)
    span("gpu_user_annotation", name, GPU, ("pass", 0), [one_id()], **{"External id": "%d"})
    kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas", 40)
    kernel(ALL_GATHER, 15)
    for pair in CHOOSE: kernel(*pair)
    copy("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", "cudaMemcpyAsync")
    arrow("f", CPU, call("cudaEventSynchronize", number := one_id()), number)
    moments, gpu = count["moment"], len(usual)
    size = {"cpu start": moments, "cpu length": moments, "gpu start": gpu, "gpu length": gpu, "pass start": 1, "pass length": 1}
    at, times = {}, sum(size.values())
    for what, n in size.items(): at[what, 0] = sum(size[w] for w, _ in at)
    at |= {(what, 1): times + place for (what, _), place in at.items()} | {("id", 0): 2 * times, ("message", 0): 2 * times + count["id"]}
    return Template(kind, "".join(events), np.array([at[what, part] + i for what, part, i in wants]), np.array(usual), np.array(launch), moments, forward, slice(first, last), count["id"], sum(e.count('"kernel"') for e in events),
                    sum(e.count('"allreduce"') for e in events))


def numbers_of(step, now, number, message, random):
    "The times of a step that begins `now`, its identities and its messages: all numbers that its text needs, when each event of the GPU starts and ends, and when the next step may begin."
    cpu = now + random.integers(600, 2_600, step.moments).cumsum()
    lengths = random.integers(300, 600, step.moments)
    lengths[0] = cpu[step.forward - 1] - cpu[0] + 1_000  # the annotation is around all that launches the forward pass
    took = (step.usual * random.normal(1_000, 40, len(step.usual)).clip(800, 1_200)).astype(np.int64)
    before = np.append(0, (took + 200).cumsum()[:-1])
    start = np.maximum.accumulate(cpu[step.launch] + 3_000 - before) + before  # a kernel waits for its launch and for the one before it
    end = start + took
    passed = start[step.passes][0], end[step.passes][-1] - start[step.passes][0]
    times = np.concatenate([cpu, lengths, start, took, passed])
    return np.concatenate([times // 1000, times % 1000, number + np.arange(step.ids), message + np.arange(len(step.usual))]), start, end, max(end[-1], cpu[-1]) + random.integers(10_000, 30_000)


def blocks(size, seed, layout, graphs, laid_down):
    "Bytes of a trace of about `size` bytes, a step at a time. The model is Kimi's where there is room for ten steps of it."
    random = np.random.default_rng(seed)
    comma, colon = ("," if layout == "compact" else ", "), (":" if layout == "compact" else ": ")
    if layout.startswith("kineto"): yield f"\n{json.dumps(HEADER, indent=2)[:-2]},\n  \"traceEvents\": [".encode()
    else: yield f"{json.dumps(HEADER, separators=(comma, colon))[:-1]}{comma}\"traceEvents\"{colon}[".encode()
    layers = max(1, min(61, size // 600_000))
    decodes, prefill = [template_of("decode", layers, graphs, layout, random) for _ in range(3)], template_of("prefill", layers, graphs, layout, random)
    written, now, number, message, steps = 0, 4_458_676_522_690_655, 1, 0, 0
    while written < size:
        step = prefill if steps % 16 == 3 else decodes[random.integers(len(decodes))]
        values, start, end, following = numbers_of(step, now, number, message, random)
        block = (step.text % tuple(values[step.numbers].tolist())).encode()
        kernels = step.passes.start  # copies before them are the step's too, but no kernel
        laid_down.append(dict(kind=step.kind, start=BASE + int(start[kernels]), kernels=step.kernels, all_reduces=step.all_reduces))
        now, number, message, steps, written = following, number + step.ids, message + step.all_reduces + 1, steps + 1, written + len(block)
        yield block
    last = dict(name='"Record Window End"', ph='"i"', s='"g"', pid='""', tid='""', ts=f"{now // 1000}.{now % 1000:03d}", cat='"Trace"')
    yield template(last, layout).rstrip(", ").encode()
    if layout.startswith("kineto"): yield ("\n  ],\n  " + json.dumps(FOOTER, indent=2)[1:].lstrip()).encode()
    else: yield f"]{comma}{json.dumps(FOOTER, separators=(comma, colon))[1:]}".encode()


def write_trace(path, size, seed=0, layout="kineto", graphs=False, laid_down=None):
    "Write a serving trace of about `size` bytes uncompressed; a name that ends in .gz is compressed. The same seed gives the same bytes. What its steps are is added to the list `laid_down`."
    path = Path(path)
    with (gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb")) as out:
        for block in blocks(size, seed, layout, graphs, [] if laid_down is None else laid_down): out.write(block)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=LAYOUTS, default="kineto")
    parser.add_argument("--graphs", action="store_true", help="the forward pass of a decode step is one launch")
    given = parser.parse_args()
    print(write_trace(given.out, given.megabytes * 1_000_000, given.seed, given.layout, given.graphs))
