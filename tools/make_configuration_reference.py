"""Write docs/configuration.md from the models of the recipe."""

from pathlib import Path

from plimsoll.config.reference import configuration_markdown

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

if __name__ == "__main__":
    PAGE.write_text(configuration_markdown(), encoding="utf-8")
    print(PAGE)
