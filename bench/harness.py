"""Benchmarks by lm_eval, the harness that published figures come from: a GPT as its backend, and its tasks.

The backend answers as `lm_eval --model hf` does with the same weights in Hugging Face's format: the same tokens, the
same truncation from the left, the same stop texts. It asks model.py itself and not an exported class, so that a changed
model is measured as it is, and keeps the logits of a few positions only: a benchmark takes little memory beside a
training run. bench/evaluate.py and train.py import this file only where they run tasks: lm_eval is an optional package
and takes seconds to import.

Shape legend: B batch, T time, C channels, N tokens of continuations, V vocabulary.
"""

from __future__ import annotations

import difflib
import io
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from data.tokenizer import Tokenizer, from_meta
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.inference import InferenceEngine
from deskgpt.compute.runner import Runner
from deskgpt.run.stopping import signal_handler
from model import GPT

END_OF_TEXT = "<|endoftext|>"  # the end_of_text of all tokenizers, as text
MAX_NEW_TOKENS = 256  # of tasks that name no number, as in lm_eval's hf
LOGITS_PER_CHUNK = 1 << 26  # 256 MB in float32
# Resamplings for a standard error without a formula, such as perplexity's. They know it to 1 / sqrt(2 * 1000) = 2%.
BOOTSTRAP = 1000
CHECKED = 100  # items of each task, before the first evaluation
Figures = dict[str, dict[str, float | None]]  # by task and metric
# lm_eval's own seeds: of Python's random numbers, and of numpy's and the few-shot examples.
RANDOM_SEED = 0
SEED = 1234
# Resampling stays in this process. lm_eval would fork others, which inherit this one's handlers of signals: SIGTERM,
# which is to end them, would then tell this run to stop, or do nothing, so that both wait for ever.
os.environ["DISABLE_MULTIPROC"] = "1"


# ---- the backend ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """How a task wants text to be generated."""

    stop: tuple[str, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def until_stop(self, text: str) -> str:
        """The text before the first stop text."""
        for stop in self.stop:
            text = text.partition(stop)[0]
        return text


class Backend(TemplateLM):
    """A GPT as lm_eval asks it: how likely a continuation of a text is, and what comes next.

    using: within it the model computes as it should (Reading.using). batch_size: rows at a time. stopped: once it
    returns True, all further answers are empty, so that the harness comes to its end at once, on all ranks; its results
    are then meaningless.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        replacing: Callable[[], AbstractContextManager[None]] = nullcontext,
        batch_size: int = 16,
        ranks: DistContext | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.replacing = replacing
        self.batch_size = batch_size
        self.stopped = stopped
        self.n_truncated = 0  # requests that lost the beginning of their context
        self.weights_device = next(model.parameters()).device
        self.ranks = ranks or DistContext(self.weights_device)
        self._rank = self.ranks.rank
        self._world_size = self.ranks.world
        self._device = torch.device("cpu")  # where lm_eval puts what the ranks exchange

    # ---- what lm_eval asks about it ----------------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.ranks.gather(tensor))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        gathered = self.ranks.gather(obj)
        return gathered if self.rank == dst else None

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context becomes: end_of_text, as GPT-2's. Characters have none: a line begins, or token 0."""
        if self.tokenizer.end_of_text is not None:
            return self.tokenizer.end_of_text
        try:
            return int(self.tokenizer.encode("\n")[0])
        except ValueError:
            return 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, in which "<|endoftext|>" is that token. Raises ValueError for unknown characters."""
        end = self.tokenizer.end_of_text
        if end is None:
            return self.tokenizer.encode(string).tolist()
        ids: list[int] = []
        for piece in string.split(END_OF_TEXT):
            ids += [*self.tokenizer.encode(piece).tolist(), end]
        return ids[:-1]

    def check(self, request: Any) -> None:
        """Raises ValueError, naming the task, where a request (lm_eval's Instance) cannot be answered."""
        try:
            texts = [text for text in request.args if isinstance(text, str)]
            self.tok_encode("".join(texts))
            if request.request_type == "generate_until":
                self.generation_of(request.args[1])
        except ValueError as e:
            raise ValueError(f"task {request.task_name}: {e}") from None

    def batches(self, items: list[Any], what: str, size: int) -> Iterator[list[Any]]:
        """The items, `size` of them at once, until stopped; a terminal shows how far they are."""
        hidden = None if self.rank == 0 else True  # None: hidden where it is no terminal
        with tqdm(total=len(items), desc=what, leave=False, file=sys.__stderr__, disable=hidden) as bar:  # past quiet()
            for i in range(0, len(items), size):
                if self.stopped():
                    break
                batch = items[i : i + size]
                yield batch
                bar.update(len(batch))

    # ---- how likely --------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts, in windows of the context's length, each text by itself."""
        windows = []
        owners = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            limit = self.model.config.block_size
            for window in get_rolling_token_windows(ids, self.prefix_token_id, limit, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        sums = [0.0] * len(requests)
        for i, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[i] += log_likelihood
        return sums

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation): its log-likelihood, and whether it is what greedy decoding gives.

        Requests that differ in their last token only, such as answers A to D, share a row.
        """
        limit = self.model.config.block_size
        requests_of: dict[tuple[int, ...], list[int]] = {}  # by the tokens of a row
        for i, (texts, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= limit:
                raise ValueError(
                    f"a task asks for a continuation of {len(continuation)} tokens after {len(context)}; with "
                    f"block_size={limit} it must have 1 to {limit}, after at least one: {str(texts)[-200:]}"
                )
            tokens = context + continuation
            self.n_truncated += len(tokens) > limit + 1
            row = tuple(tokens[-(limit + 1) : -1])
            requests_of.setdefault(row, []).append(i)

        answers = [(0.0, False)] * len(requests)
        rows = sorted(requests_of, key=len, reverse=True)  # what memory cannot hold fails at once
        for batch in self.batches(rows, "log-likelihoods", self.batch_size):
            # Padding on the right is later than every token that counts: causal attention does not see it.
            padded = [row + (0,) * (len(batch[0]) - len(row)) for row in batch]
            asked = [(b, i) for b, row in enumerate(batch) for i in requests_of[row]]
            continuations = [requests[i][2] for _, i in asked]
            targets = [token for continuation in continuations for token in continuation]
            with self.replacing():
                h = self.model.transformer(torch.tensor(padded, device=self.weights_device))  # (B, T, C)
                before = []  # for each request, the places before each token of its continuation
                for (b, _), continuation in zip(asked, continuations, strict=True):
                    before.append(h[b, len(batch[b]) - len(continuation) : len(batch[b])])
                log_p, greedy = self.scores(torch.cat(before), torch.tensor(targets))
            counts = [len(continuation) for continuation in continuations]
            for (_, i), p, g in zip(asked, log_p.split(counts), greedy.split(counts), strict=True):
                answers[i] = (p.sum().item(), bool(g.all()))
        return answers

    def scores(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probabilities of the targets (N,), whether each is the likeliest token (N,)), on the CPU.

        h: (N, C), the last hidden states before the targets (N,).
        """
        log_ps = []
        greedy = []
        at_once = max(1, LOGITS_PER_CHUNK // self.model.config.vocab_size)
        for part, expected in zip(h.split(at_once), targets.to(h.device).split(at_once), strict=True):
            log_p = F.log_softmax(self.model.logits(part).float(), -1)  # (at_once, V)
            log_ps.append(log_p.gather(1, expected[:, None])[:, 0])
            greedy.append(log_p.argmax(1) == expected)
        return torch.cat(log_ps).cpu(), torch.cat(greedy).cpu()

    # ---- what comes next ---------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first stop text, likeliest tokens only unless the task wants them drawn; one at a time."""
        texts = [""] * len(requests)
        for [i] in self.batches(list(range(len(requests))), "texts", 1):
            text, options = requests[i].args
            way = self.generation_of(options)
            ids = self.tok_encode(text) or [self.prefix_token_id]
            room = self.model.config.block_size - way.max_new_tokens
            self.n_truncated += len(ids) > room
            texts[i] = self.continuation(ids[-room:], way, SEED + i)
        return texts

    def generation_of(self, options: dict[str, Any]) -> Generation:
        """What a task's generation_kwargs say. Raises ValueError where they cannot be followed."""
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("num_beams") == 1:
            del given["num_beams"]
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        stop = [text for text in wanted.pop("until") if text]
        if self.tokenizer.end_of_text is not None:
            stop.append(END_OF_TEXT)
        most = wanted.pop("max_gen_toks")
        is_drawn = wanted.pop("do_sample")
        temperature = float(wanted.pop("temperature", 0.0))
        top_k = wanted.pop("top_k", None) or None
        top_p = wanted.pop("top_p", None) or 1.0
        if wanted:
            raise ValueError(f"its generation_kwargs {wanted} are not supported here")
        limit = self.model.config.block_size
        if most >= limit:
            raise ValueError(f"it generates up to {most} tokens; block_size={limit} leaves none for the prompt")
        return Generation(tuple(stop), most, temperature if is_drawn else 0.0, top_k, top_p)

    def continuation(self, prompt: list[int], way: Generation, seed: int = SEED) -> str:
        """The text that follows a prompt, up to a stop text, a text's end or the tokens that the task allows."""
        tokens = self.model.generate(
            torch.tensor([prompt], device=self.weights_device),
            way.max_new_tokens,
            temperature=way.temperature,
            top_k=way.top_k,
            top_p=way.top_p,
            seed=seed,
            vocab_size=self.tokenizer.vocab_size,
        )
        written: list[int] = []
        text = ""
        with self.replacing():
            for token in tokens:
                if self.stopped() or int(token) == self.tokenizer.end_of_text:
                    break
                written.append(int(token))
                whole = self.tokenizer.decode_bytes(written).decode("utf-8", "replace")
                text = way.until_stop(whole)
                if text != whole:
                    break
        return text


# ---- tasks ---------------------------------------------------------------------------------------------------


class Tasks:
    """Tasks of lm_eval, loaded once, to be evaluated as often as wanted.

    names: of tasks, groups and tags of lm_eval, with wildcards, or paths of YAML files, separated by commas. limit:
    items of each task, 0 = all. num_fewshot: examples before each question, None = the task's own number. Raises
    ValueError, naming the task, where one cannot be had.
    """

    def __init__(self, names: str, limit: int = 0, num_fewshot: int | None = None) -> None:
        self.limit = limit or None
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        if not wanted:
            raise ValueError("no task is named; try --tasks=lambada_openai,hellaswag")
        # lm_eval's own thousands of tasks take half a minute to list.
        manager = TaskManager(include_defaults=not all(map(is_file, wanted)))
        with random_numbers_kept():
            self.loaded = loaded(manager, found_tasks(manager, wanted))
        for name, task in self.loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise ValueError(f"task {name}: it runs code of the model, or shows it pictures; not supported here")
            own = task.get_config("num_fewshot")
            if num_fewshot is not None and own != 0:  # 0 in a task's file is meant
                task.set_config("num_fewshot", num_fewshot)
            elif own is None:
                task.set_config("num_fewshot", 0)

    def check(self, backend: Backend) -> None:
        """Raises ValueError where this model and tokenizer cannot answer one of the first requests of a task.

        Not of all: lm_eval takes milliseconds to write one, and writes them again for each evaluation.
        """
        for name, task in self.loaded["tasks"].items():
            try:
                with self.seeded(), quiet():
                    task.build_all_requests(limit=min(self.limit or CHECKED, CHECKED))
            except Exception as e:  # such as a template's, about a field that the items lack
                raise ValueError(f"task {name}: its questions cannot be written ({type(e).__name__}: {e})") from None
            items = len(task.eval_docs)
            if min(self.limit or items, items) < backend.world_size:
                raise ValueError(f"task {name}: too few items for {backend.world_size} ranks to share")
            for request in task.instances:
                backend.check(request)

    def evaluate(self, backend: Backend, log_samples: bool = False) -> dict[str, Any]:
        """lm_eval's results: by task its metrics ("results"), "versions", "n-shot", "n-samples"; {} on other ranks.

        The model is in evaluation mode meanwhile, and random numbers go on afterwards as if nothing had been.
        "truncated" counts the requests that lost the beginning of their context.
        """
        was_training = backend.model.training
        backend.model.eval()
        backend.n_truncated = 0
        try:
            with self.seeded(), quiet():
                found = evaluate(
                    backend, self.loaded, limit=self.limit, bootstrap_iters=BOOTSTRAP, log_samples=log_samples
                )
        finally:
            backend.model.train(was_training)
        n_truncated = sum(backend.ranks.gather(backend.n_truncated))
        return {} if found is None else found | {"truncated": n_truncated}

    def describe(self, found: Figures) -> str:
        """Such as "lambada_openai perplexity 40.06 ± 1.48, acc 0.3256 ± 0.0066; hellaswag acc ..."

        A group that has figures of its own stands for its tasks.
        """
        covered = set()
        for name, group in self.loaded["groups"].items():
            if found.get(name):
                covered |= {task.task_name for task in group.get_all_tasks()}
                covered |= {inner.name for inner in group.get_all_groups()}
        shown = [task for task in found if task not in covered and found[task]]
        return "; ".join(f"{task} {', '.join(metrics_in_words(found[task]))}" for task in shown)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Seeds the random numbers as lm_eval does, and restores them afterwards."""
        with random_numbers_kept():
            random.seed(RANDOM_SEED)
            np.random.seed(SEED)
            for task in self.loaded["tasks"].values():
                task.set_fewshot_seed(SEED)
            yield


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Random numbers of Python, numpy and torch go on after the block as if it had not been."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps out what lm_eval prints about its progress: its bars, which it draws in files too."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def found_tasks(manager: TaskManager, wanted: list[str]) -> list[str]:
    """Names that the manager knows, and paths. Raises ValueError with the nearest names for another one."""
    names: list[str] = []
    for name in wanted:
        matching = [name] if is_file(name) else manager.match_tasks([name])
        if not matching:
            near = difflib.get_close_matches(name, manager.all_tasks, n=5)
            meant = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
            raise ValueError(f"task {name}: lm_eval has no such task; {meant}")
        names += matching
    return list(dict.fromkeys(names))


def loaded(manager: TaskManager, names: list[str]) -> dict[str, Any]:
    """The tasks and groups with their data, as lm_eval evaluates them. Raises ValueError where they cannot be had."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without a line for each time that it tries again
    try:
        return dict(manager.load(names))
    except ModuleNotFoundError:
        raise
    except Exception as e:  # of datasets, the hub, the network, YAML; a task by itself and in a group
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(
            f"tasks={','.join(names)}: a task cannot be loaded ({reason[:200]}); the data of lm_eval's own tasks are "
            "downloaded once, from the Hugging Face hub: connect, or name a YAML file with local data"
        ) from None


# ---- figures -------------------------------------------------------------------------------------------------


def figures(results: dict[str, Any]) -> Figures:
    """By task and group: each metric and its standard error, as `acc` and `acc_stderr`; None if it is not known.

    A metric of one of several filters has its name after a comma: `exact_match,strict-match`.
    """
    out: Figures = {}
    for task, values in results.get("results", {}).items():
        out[task] = {}
        for key, value in values.items():
            metric, _, of_filter = key.partition(",")
            if not of_filter:  # the name, an alias, the number of items
                continue
            name = metric.removesuffix("_stderr")
            name = name if of_filter == "none" else f"{name},{of_filter}"
            name += "_stderr" if metric.endswith("_stderr") else ""
            is_number = isinstance(value, int | float | np.number) and math.isfinite(value)
            out[task][name] = float(value) if is_number else None
    return out


def metrics_in_words(values: dict[str, float | None]) -> list[str]:
    out = []
    for name, value in values.items():
        if is_error(name):
            continue
        error = values.get(f"{name}_stderr")
        out.append(f"{name} {number(value)}" + ("" if error is None else f" ± {number(error)}"))
    return out


def is_error(name: str) -> bool:
    return name.endswith("_stderr")


def number(value: float | None) -> str:
    """Four decimals of a share, four digits of anything larger."""
    if value is None:
        return "n/a"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


# ---- benchmarks of a run -------------------------------------------------------------------------------------


class Benchmark:
    """Tasks of lm_eval for the model as it trains, which they leave as it is; the ranks share the items."""

    def __init__(self, settings: Mapping[str, Any], model: GPT, tokenizer: dict[str, Any], ranks: DistContext) -> None:
        """Loads and checks the tasks that train.py's settings name.

        Raises ValueError where one cannot be had or does not fit model and tokenizer.
        """
        if not ranks.is_first:
            ranks.agree(0)  # until the first rank has downloaded the data
        self.tasks = Tasks(settings["tasks"], limit=settings["tasks_limit"])
        if ranks.is_first:
            ranks.agree(0)
        self.interval = settings["tasks_interval"]
        self.eval_interval = settings["eval_interval"]
        self.ranks = ranks
        self.backend = Backend(
            model, from_meta(tokenizer), ranks=ranks, stopped=lambda: signal_handler.signal is not None
        )
        if ranks.is_first:
            self.tasks.check(self.backend)

    def is_due(self, step: int, is_last: bool) -> bool:
        return is_last or step // self.eval_interval % self.interval == 0

    def run(self, runner: Runner, batch_size: int) -> tuple[Figures, str]:
        """What it found, and in words; empty on other ranks than the first.

        A signal breaks it off: its figures then mean nothing.
        """
        prompt = torch.tensor([[self.backend.prefix_token_id]], device=runner.device)
        reading = InferenceEngine(
            runner.model,
            prompt,
            runner.form.dtype,
            reference_only=runner.form.reference_only,
            remembers=False,
            print0=self.ranks.print0,
        )
        self.backend.replacing = reading.replacing
        self.backend.batch_size = batch_size
        found = figures(self.tasks.evaluate(self.backend))
        return found, self.tasks.describe(found)
