"""What campaigns share: they tell what they have found when they are over."""

import pytest


@pytest.fixture(scope="module")
def tell(request):
    """Prints a text although output is captured."""
    plugins = request.config.pluginmanager

    def write(text):
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            plugins.getplugin("terminalreporter").write_line(f"\n\n{text}\n")

    return write
