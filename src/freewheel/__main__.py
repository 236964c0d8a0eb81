"""``python -m freewheel``."""

from freewheel.cli import main

raise SystemExit(main())
