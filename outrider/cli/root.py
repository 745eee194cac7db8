"""The root of the command line: one module a subcommand, imported only when it is asked for."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import threading

import click

from outrider.cli import is_interrupt
from outrider.errors import MissingExtraError, OutriderError

__all__ = ["COMMANDS", "cli", "run"]

SECTIONS = {
    "Begin here": {
        "demo": "Fetch, export, check and decode a real model, with and without a draft, and under heat.",
        "doctor": "Say what this machine has, what its sensors tell, and where drafts pay for a bundle.",
    },
    "Make a bundle": {
        "fetch": "Download a model of the catalog and check it; list the catalog.",
        "export": "Turn a checkpoint, or a pair of them, into a bundle.",
        "check": "Prove a bundle: hashes, tokenizer, logits, row independence, text.",
        "push": "Copy a bundle to an Android phone, and prove every file there.",
    },
    "Use it": {
        "generate": "Complete a prompt with a bundle.",
        "chat": "Talk to a bundle.",
    },
    "Measure it": {
        "bench": "Compare plain and speculative decoding, side by side in one run.",
        "profile": "Find what a bundle sustains within power and heat, here or on a simulated device.",
    },
    "Devices, power and heat": {
        "plan": "Choose units, precision and drafting for a pair on a device, and say why.",
        "devices": "List device profiles, and where each of their figures is from.",
        "calibrate": "Measure this machine with a bundle, and keep it as a device profile.",
        "record": "Record power, heat, clocks and memory of this machine or a phone.",
        "acceptance": "Record what a bundle's drafters get right, to simulate from.",
        "simulate": "Compare policies over a scripted day on a simulated device.",
    },
}
EXIT_CODES = (
    "Exit codes: 0 done; 1 the work failed, or a bundle, checkpoint or trace is damaged; 2 an option, a path, or a"
    " file of settings or prompts cannot be honoured; 130 interrupted."
)
COMMANDS = {name: about for section in SECTIONS.values() for name, about in section.items()}


class Interrupted(Exception):  # noqa: N818  (named after the condition)
    """Raised from what Ctrl-C led to: click would print a blank line for a KeyboardInterrupt."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and help line, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `outrider.cli.<name>`, whose `command` is the subcommand."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"outrider.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; an error that names a parameter of the library names the option instead.

        Raises Interrupted for any error that came of an interrupt.
        """
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            if is_interrupt(error):
                raise Interrupted from error
            if not isinstance(error, OutriderError):
                raise
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is not None and len(error.args) == 1:
                from outrider.cli.messages import in_options

                error.args = (in_options(str(error), command),)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by what they are for, without importing them."""
        widest = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{widest}}", about) for name, about in commands.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="outrider", prog_name="outrider")
@click.option("--verbose", "-v", is_flag=True, help="Log what the library does, to standard error.")
def cli(verbose: bool) -> None:
    """Speculative decoding for phones, boards and laptops.

    A small draft proposes tokens, a large target checks several in one forward; the text is the target's own.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def run() -> int:
    """Run the command line and return its exit code; an `OutriderError` is a message, never a traceback.

    Raises KeyboardInterrupt, or Interrupted.
    """
    _clean_up_when_terminated()
    try:
        code = cli.main(standalone_mode=False, prog_name="outrider")
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except OutriderError as error:
        click.echo(f"outrider: {error}", err=True)
        code = error.exit_code
    except ModuleNotFoundError as error:
        extra = _extra_of(error)
        if extra is None:
            raise
        click.echo(f"outrider: {extra}", err=True)
        code = extra.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    except OSError as error:
        click.echo(f"outrider: {_told(error)}", err=True)
        code = 1
    return code if isinstance(code, int) else 0


def _extra_of(error: ModuleNotFoundError) -> MissingExtraError | None:
    """What to install for a library that an export imports, where that is what is missing."""
    from outrider.export.device_plans import EXTRA_MODULES

    module = (error.name or "").partition(".")[0]
    extras = [extra for extra, modules in EXTRA_MODULES.values() if module in modules]
    return MissingExtraError(module, extras[0]) if extras else None


def _told(error: OSError) -> str:
    """Which file, and what about it; the system's own error numbers help nobody."""
    return f"{error.filename or 'standard output, or a temporary file'}: {error.strerror or error}"


def _clean_up_when_terminated() -> None:
    """SIGTERM (of `timeout`, a container, a service) and a closed terminal undo what was begun, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
