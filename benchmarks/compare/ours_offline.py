"""Lockstep's LLM class, as a subject: `python -m benchmarks.compare.ours_offline '{OPTIONS}'`.

The options are EngineConfig's.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.peers.runner import Requests, answer, take_stdout
from runtime import LLM, SamplingParams
from runtime.config import EngineConfig


@contextmanager
def without_tokenizer(folder: Path) -> Iterator[Path]:
    """A folder of links to all files but the tokenizer's.

    Token ids are compared, and peers are told not to make text of them either.
    """
    with TemporaryDirectory() as place:
        for path in folder.iterdir():
            if not path.name.startswith("tokenizer"):
                (Path(place) / path.name).symlink_to(path.resolve())
        yield Path(place)


def main() -> None:
    answers = take_stdout()
    options = json.loads(sys.argv[1])
    with without_tokenizer(Path(options.pop("model"))) as model:
        config = EngineConfig(model=str(model), **options)
        with LLM.from_config(config, progress=False) as llm:

            def run(requests: Requests) -> list[int]:
                params = [
                    SamplingParams(max_tokens=each["output_len"], temperature=0, ignore_eos=True)
                    for each in requests
                ]
                prompts = [each["prompt"] for each in requests]
                completions = llm.generate(prompts, params, progress=False)
                return [len(each.token_ids) for each in completions]

            answer(answers, f"Lockstep {version('lockstep-serving')}", run)


if __name__ == "__main__":
    main()
