from arpo.start.load import load_or_exit, run_or_exit
from extras.ablation.config import AblationConfig


def main() -> None:
    cfg = load_or_exit(AblationConfig)
    from extras.ablation.runs import run_ablation  # after the config, so that --help and mistakes answer at once

    run_or_exit(run_ablation, cfg)


if __name__ == "__main__":
    main()
