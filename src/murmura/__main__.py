"""``python -m murmura`` is the command ``murmura``."""

from murmura.tools.cli.main import app

if __name__ == "__main__":
    app(prog_name="murmura")
