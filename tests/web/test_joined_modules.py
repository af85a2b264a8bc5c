"""Modules joined into one script: in order, each in a function of its own; another form is an error."""

import shutil
import subprocess

import pytest

from holdfast.web.joined_modules import join_modules
from holdfast.web.static_files import read_static

FILES = {
    "app.js": 'import { twice as double, START } from "./math.js";\nimport { say } from "./say.js";\n\n'
    "const x = 1;\nsay(double(START) + x);\n",
    "math.js": "const x = 5;\nexport const START = x;\nexport function twice(n) { return 2 * n; }\n",
    "say.js": 'import { twice } from "./math.js";\n\nexport function say(n) { console.log(n, twice(0)); }\n',
    "unused.js": "export const y = 1;\n",
}


def test_order_and_names(tmp_path):
    script = join_modules(FILES, "app.js")
    assert script.index('modules["math.js"]') < script.index('modules["say.js"]') < script.index('modules["app.js"]')
    assert "unused" not in script
    assert "import" not in script
    assert "const {twice: double" in script.replace("{ ", "{")


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run it")
def test_it_runs(tmp_path):
    (tmp_path / "joined.js").write_text(join_modules(FILES, "app.js"))
    done = subprocess.run(
        ["node", str(tmp_path / "joined.js")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("11 0\n", "")


@pytest.mark.parametrize(
    "line", ['import x from "./math.js";', 'import "./math.js";', "export default 1;", "export { x };"]
)
def test_other_forms_are_errors(line):
    with pytest.raises(ValueError, match="cannot join"):
        join_modules(FILES | {"app.js": f"{line}\n"}, "app.js")


def test_circles_are_errors():
    files = {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\nexport const b = 1;\n'}
    with pytest.raises(ValueError, match="circle"):
        join_modules(files, "a.js")


def test_the_modules_of_the_page_can_be_joined():
    files = {name: body.decode() for name, (body, _) in read_static().items() if name.endswith(".js")}
    assert join_modules(files, "app.js").count("modules[") > len(files) / 2
