"""The systems that decode benchmarks compare, behind one small interface.

Each system is measured in a process of its own (thread pools and memory stay apart). It loads one model and answers
``generate(prompts, tokens)``: exactly ``tokens`` tokens for each prompt, all prompts at once, no early stop. Variants
of this engine, which differ in its options, run side by side in one process and share the model.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch

    from freewheel.config import EngineConfig
    from freewheel.engine.runner import Runner
    from freewheel.models.load import DType, LoadedModel
    from freewheel.models.spec import ModelSpec

TokenIds = list[int]

SETTLED = 8  # tokens that every prompt has before steps are looked at one by one
MOST_AHEAD = 8  # steps that an engine may have launched and not yet read


@dataclass(frozen=True)
class Setup:
    """What to load, and what will be asked of it.

    Attributes:
        model: a file or folder; empty for random weights.
        shape: of random weights, a name or a ``config.json``; empty for a model.
        dtype: of weights and activations, in the system's own words.
        device: "cpu", "cuda" or "cuda:N".
        batch: most prompts at once.
        prompt, output: tokens of each.
        sampling: fields of :class:`freewheel.sampling.SamplingParams`: temperature, top_k and top_p.
        engine: fields of :class:`freewheel.config.EngineConfig` that differ from the benchmark's.
        float32_logits: have this engine copy the logits to float32 before it draws, which it has no need to.
    """

    model: str
    shape: str
    dtype: str
    device: str
    batch: int
    prompt: int
    output: int
    sampling: dict[str, Any]
    engine: dict[str, Any]
    float32_logits: bool = False

    @property
    def context(self) -> int:
        return self.prompt + self.output

    @property
    def engine_options(self) -> dict[str, Any]:
        """Fields of :class:`freewheel.config.EngineConfig`. Prefix cache off: repetitions measure the same work. And no
        speculation, which measures the text."""
        fixed = {"max_num_seqs": self.batch, "max_model_len": self.context, "enable_prefix_caching": False}
        return fixed | {"speculation": False} | self.engine


@dataclass(frozen=True)
class Reads:
    """Bytes that a decode step must read.

    Attributes:
        weights: once a step.
        cache: for each layer the keys and values of a token, and the window of tokens that it sees if there is one.
    """

    weights: int
    cache: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def of(cls, weights: int, spec: "ModelSpec", dtype: "torch.dtype") -> "Reads":
        token = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        return cls(weights, tuple((token, window) for window in spec.windows))

    def cache_bytes(self, prompt: int, output: int) -> float:
        """Bytes of cache read for one token, the mean over the second to the last token of an output."""
        contexts = range(prompt + 1, prompt + output)
        return sum(
            token * sum(length if window is None else min(length, window) for length in contexts) / len(contexts)
            for token, window in self.cache
        )

    def step_bytes(self, batch: int, prompt: int, output: int) -> float:
        """Bytes of a step, on average."""
        return self.weights + batch * self.cache_bytes(prompt, output)


class System(Protocol):
    """A loaded model of one serving system."""

    @property
    def reads(self) -> Reads | None:
        """What its steps have to read, if that is known."""
        ...

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        """Return how many tokens each prompt got, once they are on the host."""
        ...


class Freewheel:
    """This engine behind its offline API, text included."""

    def __init__(self, setup: Setup) -> None:
        from freewheel.llm import LLM

        self.llm = LLM(setup.model, dtype=cast("DType", setup.dtype), device=setup.device, **setup.engine_options)
        self.reads = Reads(self.llm.weight_bytes)
        self.sampling = setup.sampling

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        from freewheel.sampling import SamplingParams

        params = SamplingParams(**self.sampling, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class FreewheelEngine:
    """This engine alone: token ids in, token ids out.

    Args:
        setup: how it is to run.
        model: a loaded one, which several engines may share; None: the setup's is loaded.

    Attributes:
        engine: the engine.
        device: where it runs.
        start_s: seconds that it took to build, once the weights were in place.
        copied: bytes of the float32 copy of a row's logits, or 0.
    """

    def __init__(self, setup: Setup, model: "LoadedModel | None" = None) -> None:
        from freewheel.config import EngineConfig
        from freewheel.engine.build import build_engine

        model = model or load_model(setup)
        wait_for(setup.device)
        begin = time.perf_counter()
        config = EngineConfig(**setup.engine_options)
        runner = float32_runner(config, model.decoder.device.type) if setup.float32_logits else None
        self.engine = build_engine(model, config, runner)
        wait_for(setup.device)
        self.start_s = time.perf_counter() - begin
        self.device = setup.device
        self.copied = 4 * model.spec.vocab_size if setup.float32_logits else 0
        self.reads = Reads.of(model.decoder.weight_bytes, model.spec, model.decoder.dtype)
        self.sampling = setup.sampling

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        counts = self._add(prompts, tokens)
        while self.engine.has_unfinished:
            self._step(counts)
        return [counts[str(number)] for number in range(len(prompts))]

    def start(self, prompts: Sequence[TokenIds], tokens: int) -> int:
        """Begin, and stop soon after all prompts decode.

        Returns how many steps are sure to follow that bring each a token; what is left then has to be drained.
        """
        counts = self._add(prompts, tokens)
        while self.engine.has_unfinished and (len(counts) < len(prompts) or min(counts.values()) < SETTLED):
            self._step(counts)
        return max(tokens - max(counts.values()) - MOST_AHEAD, 0)

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_unfinished:
            self.engine.step()

    def _add(self, prompts: Sequence[TokenIds], tokens: int) -> Counter[str]:
        from freewheel.request import Request
        from freewheel.sampling import SamplingParams

        params = SamplingParams(**self.sampling, max_tokens=tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.engine.add(Request(str(number), tuple(prompt), params))
        return Counter()

    def _step(self, counts: Counter[str]) -> None:
        """One step; counts the new tokens of each request."""
        for output in self.engine.step():
            if output.error:
                raise RuntimeError(output.error)
            counts[output.request_id] += len(output.token_ids)


def load_model(setup: Setup) -> "LoadedModel":
    """A setup's model for this engine."""
    from freewheel.bench.shapes import dummy_model
    from freewheel.models.load import load

    if setup.shape:
        return dummy_model(setup.shape, setup.dtype, setup.device)
    return load(setup.model, dtype=cast("DType", setup.dtype), device=setup.device)


def float32_runner(config: "EngineConfig", device: str) -> "Callable[..., Runner]":
    """Makes the runner of this configuration, with a sampler that copies the logits of every step to float32 first.

    That is how many engines draw. The copy is a part of what is captured where draws are.
    """
    import torch

    from freewheel.engine.build import runner_for
    from freewheel.sampling import Sampler, SampleRows, Samples

    class Float32Sampler(Sampler):
        def sample(self, logits: torch.Tensor, rows: SampleRows) -> Samples:
            return super().sample(logits.to(torch.float32, copy=True), rows)

    make = runner_for(config, device)
    return lambda decoder, pool, sampler: make(decoder, pool, Float32Sampler(sampler.state, draw=config.draw))


def makers(system: str, setups: Mapping[str, Setup]) -> "dict[str, Callable[[], System]]":
    """What makes each variant of a system, by its name. The model that those of this engine share is loaded at once.

    This engine is measured behind its offline API where it runs a model on the CPU and has no variants, else alone.
    """
    first, *others = setups.values()
    if system != "freewheel" or not (others or first.shape or first.device != "cpu" or first.float32_logits):
        return {variant: partial(SYSTEMS[system], setup) for variant, setup in setups.items()}
    model = load_model(first)
    return {variant: partial(FreewheelEngine, setup, model) for variant, setup in setups.items()}


def wait_for(device: str) -> None:
    """Return when a CUDA device has done all it was asked for."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


class Transformers:
    """transformers' eager ``generate``, on the weights it dequantises from the same file or on random ones."""

    inference_mode = True

    def __init__(self, setup: Setup) -> None:
        import torch

        self.torch = torch
        self.device = setup.device
        self.context = setup.context
        self.sampling = setup.sampling
        self.reads = None
        if not setup.shape:
            self.model = load_transformers(Path(setup.model), setup.dtype).to(setup.device)
            return
        from freewheel.bench.shapes import shape_config
        from freewheel.models.spec import ModelSpec

        config, dtype = shape_config(setup.shape), getattr(torch, setup.dtype)
        self.model = random_transformers(config, dtype, setup.device)
        products = (module for module in self.model.modules() if isinstance(module, torch.nn.Linear))
        parameters = (parameter for product in products for parameter in product.parameters())
        weights = sum(parameter.nbytes for parameter in parameters)
        self.reads = Reads.of(weights, ModelSpec.from_config(config), dtype)

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        ids = self.torch.tensor(prompts, device=self.device)
        with self.torch.inference_mode(self.inference_mode):
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
                **(self.sampling if self.sampling["temperature"] else {}),
                do_sample=self.sampling["temperature"] > 0,
                **self.options(len(prompts)),
            ).cpu()
        return [out.shape[1] - ids.shape[1]] * len(prompts)

    def options(self, batch: int) -> dict[str, Any]:
        """What ``generate`` takes beside prompts, lengths and parameters."""
        del batch
        return {}


class TransformersStatic(Transformers):
    """transformers' ``generate`` with a static cache, for which it compiles the decode step on CUDA devices.

    The cache is the same in every call, as one at another address would have the graphs captured again.
    """

    inference_mode = False  # torch.compile and tensors of that mode do not go well together; generate has no_grad
    batch = 0
    cache: Any = None

    def options(self, batch: int) -> dict[str, Any]:
        if batch == self.batch:
            self.cache.reset()
        else:
            self.torch.compiler.reset()  # or the second size would be compiled for all
            config, self.batch = self.model.config, batch
            self.cache = import_module("transformers").StaticCache(config=config, max_cache_len=self.context)
        return {"past_key_values": self.cache}


class LlamaCpp:
    """llama.cpp through the xllamacpp package, one slot for each prompt of the batch."""

    reads = None

    def __init__(self, setup: Setup) -> None:
        import torch

        xllamacpp: Any = import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = setup.model
        params.n_parallel = setup.batch
        params.n_ctx = setup.batch * setup.context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.verbosity = 0
        self.server = xllamacpp.Server(params)
        self.pool = ThreadPoolExecutor(setup.batch)

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        def complete(prompt: TokenIds) -> int:
            reply = self.server.handle_completions(
                {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            )
            return reply["usage"]["completion_tokens"]

        return list(self.pool.map(complete, prompts))


class CTranslate2:
    """CTranslate2's generator on a conversion of the same weights."""

    reads = None

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoTokenizer

        ctranslate2: Any = import_module("ctranslate2")
        model, dtype = Path(setup.model), setup.dtype
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "transformers"), Path(folder, "ctranslate2")
            source_model = load_transformers(model, "float32")
            if hasattr(source_model.config, "quantization_config"):  # says GGUF, but the weights are float32 by now
                source_model.hf_quantizer = None
                del source_model.config.quantization_config
            source_model.save_pretrained(source)
            folder_of_model, where = _transformers_location(model)
            tokenizer = AutoTokenizer.from_pretrained(folder_of_model, **where)
            tokenizer.save_pretrained(source)
            ctranslate2.converters.TransformersConverter(str(source)).convert(str(target), quantization=dtype)
            self.generator = ctranslate2.Generator(
                str(target), device="cpu", compute_type=dtype, inter_threads=1, intra_threads=torch.get_num_threads()
            )
        self.tokens_of = tokenizer.convert_ids_to_tokens

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        results = self.generator.generate_batch(
            [self.tokens_of(prompt) for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [len(result.sequences_ids[0]) for result in results]


def _transformers_location(model: Path) -> tuple[Path, dict[str, str]]:
    """What ``from_pretrained`` takes for a GGUF file or a checkpoint folder."""
    return (model.parent, {"gguf_file": model.name}) if model.suffix == ".gguf" else (model, {})


def load_transformers(model: Path, dtype: str) -> Any:
    """A transformers causal LM from a GGUF file or a checkpoint folder, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, where = _transformers_location(model)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where).eval()


def random_transformers(config: dict[str, Any], dtype: "torch.dtype", device: str) -> Any:
    """A transformers causal LM of a configuration, with random weights made on the device, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()


SYSTEMS: dict[str, Callable[[Setup], System]] = {
    "freewheel": Freewheel,
    "transformers": Transformers,
    "transformers-static": TransformersStatic,
    "llamacpp": LlamaCpp,
    "ctranslate2": CTranslate2,
}
ON_CPU = ("llamacpp", "ctranslate2")  # these are measured greedy, with a model, on the CPU
