"""Make a Hugging Face folder of a checkpoint, in a single process.

python -m arpo.checkpoint export RUN/checkpoints/step_000100 OUT [--adapter] [--model FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arpo.checkpoint.export import export_checkpoint
from arpo.errors import UserError, exit_with


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m arpo.checkpoint", description=__doc__.splitlines()[0])
    export = parser.add_subparsers(dest="command", required=True).add_parser("export")
    export.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_000100")
    export.add_argument("out", type=Path, help="folder to write; must not exist")
    export.add_argument("--adapter", action="store_true", help="only the LoRA adapters, in peft's format")
    export.add_argument("--model", default="", help="folder with config and tokenizer, if they have moved")
    args = parser.parse_args()
    try:
        export_checkpoint(args.checkpoint, args.out, model=args.model, adapter=args.adapter)
    except UserError as error:
        exit_with(error)
    print(args.out)


if __name__ == "__main__":
    main()
