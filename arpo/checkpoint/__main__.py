"""Make Hugging Face folders of checkpoints of this code or of the released code, in a single process.

python -m arpo.checkpoint export RUN/checkpoints/step_000100 OUT [--adapter] [--model FOLDER]
python -m arpo.checkpoint import RUN/global_step_100/actor OUT [--model FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arpo.checkpoint.export import export_checkpoint
from arpo.checkpoint.verl_import import import_verl
from arpo.errors import UserError, exit_with


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m arpo.checkpoint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="make a Hugging Face folder of a checkpoint")
    export.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_000100")
    export.add_argument("--adapter", action="store_true", help="only the LoRA adapters, in peft's format")
    verl = commands.add_parser("import", help="make a Hugging Face folder of a checkpoint of the released code")
    verl.add_argument("checkpoint", type=Path, help="RUN/global_step_100/actor")
    for command in (export, verl):
        command.add_argument("out", type=Path, help="folder to write; must not exist")
        command.add_argument("--model", default="", help="folder with config and tokenizer, if they have moved")
    args = parser.parse_args()
    try:
        if args.command == "export":
            export_checkpoint(args.checkpoint, args.out, model=args.model, adapter=args.adapter)
        else:
            import_verl(args.checkpoint, args.out, model=args.model)
    except UserError as error:
        exit_with(error)
    print(args.out)


if __name__ == "__main__":
    main()
