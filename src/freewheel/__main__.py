"""The ``freewheel`` command, also as ``python -m freewheel``. Next to nothing is imported before Ctrl-C is minded."""


def main() -> int:
    """:func:`freewheel.cli.main`, with 130 for Ctrl-C during its import as well."""
    try:
        from freewheel.interrupts import held_interrupts

        with held_interrupts():
            from freewheel.cli import main as command
        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
