"""``python -m rollout_is`` and ``torchrun -m rollout_is``."""

from rollout_is.cli.app import entry

if __name__ == "__main__":
    entry()
