"""The `outrider` command: one module a subcommand, imported only when it is asked for."""

from __future__ import annotations

import importlib
import logging
import sys

import click

from outrider.errors import OutriderError

__all__ = ["main"]

COMMANDS = {
    "fetch": "Download a model of the catalog and check it.",
    "export": "Turn a checkpoint, or a pair of them, into a bundle.",
    "check": "Prove a bundle: hashes, tokenizers, logits, row independence, text.",
    "generate": "Complete a prompt with a bundle.",
    "chat": "Talk to a bundle.",
    "acceptance": "Record what a bundle's drafters get right, to simulate plans from.",
    "bench": "Measure a bundle: prefill, plain and speculative decoding, side by side.",
    "profile": "What a bundle sustains within a power cap or a temperature limit, here or simulated.",
    "simulate": "Compare policies over a scripted day on a simulated device.",
    "doctor": "What this machine has, and whether speculation pays here for a bundle.",
    "calibrate": "Measure this machine with a bundle, and keep it as a device profile.",
    "devices": "List device profiles, and where each of their figures is from.",
    "record": "Record power, heat, clocks and memory of this machine or a phone.",
    "demo": "Fetch, export, check and decode a real model, with and without a draft.",
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and help line, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a first session, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `outrider.cli.<name>`, whose `command` is the subcommand."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"outrider.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outrider", prog_name="outrider")
@click.option("--verbose", "-v", is_flag=True, help="Log what the library does, to standard error.")
def cli(verbose: bool) -> None:
    """Speculative decoding for phones, boards and laptops.

    A small draft proposes tokens, a large target checks several in one forward; the text is the target's own.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """Run the command line; an `OutriderError` is a message and an exit code, never a traceback."""
    try:
        code = cli.main(standalone_mode=False, prog_name="outrider")
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except OutriderError as error:
        click.echo(f"outrider: {error}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("outrider: interrupted", err=True)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    except OSError as error:
        click.echo(f"outrider: {error}", err=True)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
