import pytest

from tests.merging.models import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of models, each written once: `folder(family="llama", seed=1, ...)`."""
    top = tmp_path_factory.mktemp("models")

    def find(family="llama", **options):
        path = top / "-".join([family, *(f"{k}{v}" for k, v in sorted(options.items()))])
        return path if path.exists() else write(path, family, **options)

    return find
