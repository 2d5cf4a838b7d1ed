"""The command's door: its help, which needs no settings, and its run."""

from __future__ import annotations

from collections.abc import Sequence

OVERVIEW = (
    "tokenspeed chat [MODEL] [OPTIONS]",
    "Chat with the server at --base-url, or with one that is started for it, with the options of serve.",
    (
        ("--base-url URL", "a server that runs, such as http://127.0.0.1:8000"),
        ("--system TEXT", "the system message"),
        ("--temperature NUMBER", "0 takes the likeliest token; none: the model's own"),
        ("--config FILE", "read settings from a YAML file"),
    ),
)


def chat(words: Sequence[str]) -> int:
    """Run `tokenspeed chat`; return the exit status."""
    from tokenspeed_core.commands.settings import help_topic, print_help

    topic = help_topic(words)
    if topic is not None:
        print_help(OVERVIEW, topic)
        return 0
    import typer

    from tokenspeed_chat.chat import talk
    from tokenspeed_core.commands.settings import with_settings

    app = typer.Typer(
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": []},
    )
    app.command()(with_settings(talk))
    status = app(list(words), prog_name="tokenspeed chat", standalone_mode=False)
    return status if isinstance(status, int) else 0
