"""The `mpidp` command: finds the subcommand, loads only that one, and ends the process well.

Exit status: 0 fine, 1 the command found something wrong, 2 bad usage, with one line from rank 0.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import NoReturn

import click

import mpidp
from mpidp.cli.console import only_rank_0_prints, report_error
from mpidp.errors import BuildMismatchError


@dataclass(frozen=True)
class Entry:
    """Where a subcommand lives; its one-line help here spares the import for the listing."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "bench": Entry("mpidp.cli.bench", "bench", "Measure the bandwidth of the collectives."),
    "info": Entry("mpidp.cli.info", "info", "Show the MPI, the topology and the settings in use."),
    "train": Entry("mpidp.cli.train", "train", "Train an example model, data-parallel."),
    "tune": Entry("mpidp.cli.tune", "tune", "Measure the algorithms and write a tuning table."),
}


class LazyGroup(click.Group):
    """Imports a subcommand's module when it is asked for, so `bench` loads nothing of `train`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(importlib.import_module(entry.module), entry.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with only_rank_0_prints():
            return super().parse_args(ctx, args)


@click.group(
    cls=LazyGroup, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(mpidp.__version__, prog_name="mpidp")
def cli() -> None:
    """Fast collectives on any MPI, and data-parallel training.

    Run it under the site's launcher, for example: mpiexec -n 4 mpidp bench -e 64M
    """


def run(args: list[str] | None = None) -> int:
    """Runs the command line `args` (default: sys.argv) and returns the exit status.

    Bad usage prints one line on rank 0. Other exceptions propagate.
    """
    try:
        status = cli.main(args=args, prog_name="mpidp", standalone_mode=False)
    except click.Abort as abort:
        # click wraps Ctrl-C; the except hook knows better how to end the job.
        raise abort.__cause__ or abort from None
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "mpidp"
        report_error(f"{command}: {error.format_message()} (see {command} --help)")
        return 2
    except click.ClickException as error:
        report_error(f"mpidp: {error.format_message()}")
        return error.exit_code
    except BuildMismatchError as error:
        report_error(f"mpidp: {error}")
        return 1
    except RuntimeError as error:
        # What mpi4py's import says; anything else is not ours to explain.
        if "cannot load MPI library" not in str(error):
            raise
        report_error(
            "mpidp: mpi4py cannot load an MPI library: load the MPI's module or add its folder to "
            "LD_LIBRARY_PATH, or build mpi4py for it (pip install --no-binary=mpi4py mpi4py)"
        )
        return 1
    return status if isinstance(status, int) else 0


def main() -> NoReturn:
    """The entry point of the `mpidp` command."""
    from mpidp.launch import install_excepthook

    install_excepthook()
    sys.exit(run())
