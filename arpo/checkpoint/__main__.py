"""Make Hugging Face folders of checkpoints of this code or of the released code, and upload them; in a single process.

python -m arpo.checkpoint export RUN/checkpoints/step_000100 OUT [--adapter] [--model FOLDER]
python -m arpo.checkpoint import RUN/global_step_100/actor OUT [--model FOLDER]
python -m arpo.checkpoint push RUN_OR_FOLDER OWNER/NAME [--private] [--dry-run]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arpo.checkpoint.export import export_checkpoint
from arpo.checkpoint.push import push
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
    upload = commands.add_parser("push", help="upload a model to the Hub, with a card (a token: HF_TOKEN)")
    upload.add_argument("model", type=Path, help="a run, whose newest model is taken, or a Hugging Face folder")
    upload.add_argument("repo", help="OWNER/NAME; made where it is not there")
    upload.add_argument("--private", action="store_true", help="if it is made, for its owner alone")
    upload.add_argument("--dry-run", action="store_true", help="only write the card, and say where it is")
    args = parser.parse_args()
    try:
        if args.command == "push":
            push(args.model, args.repo, private=args.private, dry_run=args.dry_run)
            return
        if args.command == "export":
            export_checkpoint(args.checkpoint, args.out, model=args.model, adapter=args.adapter)
        else:
            import_verl(args.checkpoint, args.out, model=args.model)
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        exit_with(UserError("interrupted; an upload goes on from here with the same command"))
    print(args.out)


if __name__ == "__main__":
    main()
