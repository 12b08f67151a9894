"""The ``kvfold`` command: fetch a model, see the cache at work, talk to a model, serve one."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from . import __version__
from .commands import bench, calibrate, doctor, plan, verify
from .commands.options import MODEL_HELP, add_kv_options, kv_settings, positive
from .config import KvConfig
from .devices import gpus
from .gguf_header import read_gguf_header
from .guard import check_free_memory
from .model_check import require_fit
from .models import MODELS, ModelError, pull, resolve
from .presets import PRESETS, fill
from .sizing import Settings
from .threads import recommended_threads

if TYPE_CHECKING:
    from .llama import Llama

DEMO_MODEL = "smollm2"
DEMO_DOCUMENT = "harbour_handbook.txt"
DEMO_QUESTION = "Where does the key of the shed hang?"
DEMO_CONTEXT = 4096

_DEFAULT_CONTEXT = 8192
_DEFAULT_TYPE = "fp4_csa2"
# llama-server's own.
_SERVER_BATCH = 2048
_SERVER_SLOTS = 4


def _say(line: str) -> None:
    """Progress and the cache line go to stderr; stdout is for answers and JSON."""
    print(line, file=sys.stderr, flush=True)


def demo_document() -> str:
    """The text that ``kvfold demo`` asks about."""
    return (resources.files("kvfold") / "data" / DEMO_DOCUMENT).read_text(encoding="utf-8")


def _config(arguments: argparse.Namespace) -> KvConfig:
    given = kv_settings(arguments)
    return KvConfig.from_kwargs(**{**given, **fill(arguments.preset, given, {"kv_type": _DEFAULT_TYPE})})


def _filled(arguments: argparse.Namespace) -> dict[str, Any]:
    """Context, batches and GPU layers: given, of the preset, or the command's own; ``None``: the runtime's own."""
    given = {"n_ctx": arguments.ctx_size, "n_gpu_layers": arguments.gpu_layers}
    defaults = {"n_ctx": arguments.default_context, "n_gpu_layers": 0, "n_batch": None, "n_ubatch": None}
    return fill(arguments.preset, given, defaults)


def _load(path: str, config: KvConfig, arguments: argparse.Namespace) -> Llama:
    from .llama import Llama

    return Llama(
        path,
        kv=config,
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
        memory_guard=not arguments.no_memory_guard,
        verbose=False,
        **_filled(arguments),
    )


class _Meter:
    """Passes streamed text on and measures it."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.started = time.perf_counter()
        self.first: float | None = None
        self.last = self.started

    def follow(self, chunks: Iterator[Any]) -> Iterator[str]:
        for chunk in chunks:
            text = chunk["choices"][0]["delta"].get("content")
            if not text:
                continue
            self.last = time.perf_counter()
            if self.first is None:
                self.first = self.last
            self.pieces.append(text)
            yield text

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def speeds(self, prompt_tokens: int, answer_tokens: int) -> tuple[float, float]:
        """Prompt and generation speed in tokens a second; generation does not count its first token."""
        first = self.first or self.last
        prefill = prompt_tokens / max(first - self.started, 1e-9)
        decode = (answer_tokens - 1) / max(self.last - first, 1e-9) if answer_tokens > 1 else 0.0
        return prefill, decode


def _answer(llm: Llama, messages: list[dict[str, str]], arguments: argparse.Namespace, *, show: bool) -> _Meter:
    """Stream one reply, to stdout if ``show``."""
    meter = _Meter()
    chunks: Any = llm.create_chat_completion(
        messages=messages,
        stream=True,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    for text in meter.follow(chunks):
        if show:
            print(text, end="", flush=True)
    if show:
        print(flush=True)
    return meter


def _report(llm: Llama, meter: _Meter, reused: int) -> dict[str, Any]:
    """Numbers of one reply, for ``--json`` and for the closing line."""
    total = int(llm.n_tokens)
    answer = len(llm.tokenize(meter.text.encode(), add_bos=False)) if meter.text else 0
    prompt = max(total - answer - reused, 0)
    prefill, decode = meter.speeds(prompt, answer)
    return {
        "answer": meter.text,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "prompt_tokens_per_second": round(prefill, 1),
        "answer_tokens_per_second": round(decode, 1),
        "kv": llm.kv.to_dict(),
    }


def _speed_line(report: dict[str, Any]) -> str:
    return (
        f"prompt {report['prompt_tokens']} tokens, {report['prompt_tokens_per_second']} t/s; "
        f"answer {report['answer_tokens']} tokens, {report['answer_tokens_per_second']} t/s"
    )


def _pull(arguments: argparse.Namespace) -> None:
    path = pull(arguments.model, _say)
    print(json.dumps({"model": arguments.model, "path": str(path)}) if arguments.json else path)


def _demo(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    path = pull(DEMO_MODEL, _say)
    with _load(str(path), config, arguments) as llm:
        question = f"{demo_document()}\n\n{DEMO_QUESTION}"
        if not arguments.json:
            _say(f"a handbook of {len(llm.tokenize(question.encode()))} tokens, and the question: {DEMO_QUESTION}")
        meter = _answer(llm, [{"role": "user", "content": question}], arguments, show=not arguments.json)
        report = _report(llm, meter, reused=0)
        if arguments.json:
            print(json.dumps({"model": DEMO_MODEL, "question": DEMO_QUESTION, **report}))
        else:
            print(llm.kv)
            print(_speed_line(report))


def _run(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    path = resolve(arguments.model, _say)
    with _load(str(path), config, arguments) as llm:
        if arguments.prompt is not None:
            messages = [{"role": "user", "content": arguments.prompt}]
            meter = _answer(llm, messages, arguments, show=not arguments.json)
            report = _report(llm, meter, reused=0)
            if arguments.json:
                print(json.dumps({"model": str(path), **report}))
            else:
                _say(str(llm.kv))
                _say(_speed_line(report))
            return
        if arguments.json:
            raise ValueError("--json needs -p PROMPT; a conversation has no report")
        _chat(llm, arguments)


def _chat(llm: Llama, arguments: argparse.Namespace) -> None:
    _say(str(llm.kv))
    _say("type a message; an empty line or Ctrl-D ends the conversation, Ctrl-C stops an answer")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            break
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        try:
            meter = _answer(llm, messages, arguments, show=True)
        except KeyboardInterrupt:
            print()
            messages.pop()
            continue
        except ValueError as error:
            _say(f"kvfold: {error}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": meter.text})
    _say(str(llm.kv))


def _serve(arguments: argparse.Namespace) -> None:
    from . import _launch

    config = _config(arguments)
    path = resolve(arguments.model, _say)
    filled = _filled(arguments)
    header = read_gguf_header(path)
    if config.folds:
        require_fit(header, config.kv_type)
    gpu_layers = filled["n_gpu_layers"]
    if not arguments.no_memory_guard:
        settings = Settings(
            config,
            filled["n_ctx"],
            gpu_layers,
            filled["n_batch"] or _SERVER_BATCH,
            filled["n_ubatch"] or 512,
            _server_slots(arguments.rest),
            windows=True,
        )
        check_free_memory(header, settings)
    threads = arguments.threads or recommended_threads(
        gpu_layers, int(header.arch("block_count") or 0), bool(gpu_layers and gpus())
    )
    command = ["-m", str(path), "-c", str(filled["n_ctx"]), "-t", str(threads)]
    for option, value in (("-ngl", gpu_layers), ("-b", filled["n_batch"]), ("-ub", filled["n_ubatch"])):
        if value:
            command += [option, str(value)]
    for name, value in config.to_text().items():
        command += ["--" + name.replace("_", "-"), value]
    sys.argv = ["llama-server", *command, *arguments.rest]
    _launch.server()


def _server_slots(rest: Sequence[str]) -> int:
    """How many sequences llama-server will serve at a time: its own default, or what is given to it."""
    for option, value in itertools.pairwise(rest):
        if option in ("-np", "--parallel") and value.isdigit() and int(value) > 0:
            return int(value)
    return _SERVER_SLOTS


def _add_model_options(parser: argparse.ArgumentParser, context: int) -> None:
    parser.add_argument("-c", "--ctx-size", type=int, metavar="N", help=f"context (default: {context})")
    parser.add_argument(
        "-t", "--threads", type=positive, metavar="N", help="threads (default: physical cores, 4 with all on the GPU)"
    )
    parser.add_argument("-ngl", "--gpu-layers", type=int, metavar="N", help="layers on the GPU (default: 0; -1: all)")
    parser.add_argument(
        "--no-memory-guard", action="store_true", help="load even if the free memory seems to be too little"
    )
    parser.set_defaults(preset=None, default_context=context)


def _add_preset_option(parser: argparse.ArgumentParser) -> None:
    notes = "; ".join(f"{p.name}: {p.note}" for p in PRESETS.values())
    parser.add_argument("--preset", metavar="NAME", help=f"settings for a machine ({notes}); other options go before")


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int, temperature: float) -> None:
    parser.add_argument("-n", "--max-tokens", type=positive, default=max_tokens, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, default=temperature, metavar="T", help="0 is greedy")
    parser.add_argument("--seed", type=int, metavar="N", help="random seed")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")


class _Parser(argparse.ArgumentParser):
    """Errors in one line with exit code 1, as everywhere else in this command."""

    def error(self, message: str) -> Any:
        self.exit(1, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvfold", description="llama.cpp with a folded FP4 key/value cache")
    parser.add_argument("--version", action="version", version=f"kvfold {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    sub = commands.add_parser("pull", help="fetch a small model", description="Fetch a model and print its path.")
    sub.add_argument("model", help=", ".join(MODELS))
    sub.add_argument("--json", action="store_true", help="report as JSON on stdout")
    sub.set_defaults(action=_pull)

    sub = commands.add_parser(
        "demo",
        help="ask a small model about a long text",
        description="Fetch SmolLM2-135M, ask it about a text of some 3000 tokens, and show what the cache takes.",
    )
    add_kv_options(sub, _DEFAULT_TYPE)
    _add_model_options(sub, DEMO_CONTEXT)
    _add_sampling_options(sub, 64, 0.0)
    sub.set_defaults(action=_demo)

    sub = commands.add_parser("run", help="ask a model, or talk to it", description="Ask a model, or talk to it.")
    sub.add_argument("model", help=MODEL_HELP)
    sub.add_argument("-p", "--prompt", help="one question; without it a conversation starts")
    add_kv_options(sub, _DEFAULT_TYPE)
    _add_model_options(sub, _DEFAULT_CONTEXT)
    _add_preset_option(sub)
    _add_sampling_options(sub, 512, 0.2)
    sub.set_defaults(action=_run)

    sub = commands.add_parser(
        "serve",
        help="serve the OpenAI API with llama-server",
        description="Start llama-server; options after -- go to it unchanged.",
    )
    sub.add_argument("model", help=MODEL_HELP)
    add_kv_options(sub, _DEFAULT_TYPE)
    _add_model_options(sub, _DEFAULT_CONTEXT)
    _add_preset_option(sub)
    sub.set_defaults(action=_serve)

    for command in (plan, bench, verify, calibrate, doctor):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Errors are one line on stderr and exit code 1."""
    given = list(sys.argv[1:] if argv is None else argv)
    rest: list[str] = []
    if given[:2] in (["bench", "threads"], ["bench", "report"]):
        given[:2] = ["-".join(given[:2])]
    if given[:1] == ["serve"] and "--" in given:
        split = given.index("--")
        given, rest = given[:split], given[split + 1 :]
    arguments = _parser().parse_args(given)
    arguments.rest = rest
    action: Callable[[argparse.Namespace], int | None] = arguments.action
    try:
        return action(arguments) or 0
    except (ModelError, ValueError, RuntimeError, ImportError, MemoryError) as error:
        print(f"kvfold: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (``kvfold demo | head -1``); there is nobody left to tell.
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
