"""The documentation: links, public names, samples. Without network or mkdocs."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

import firstloss as fl
from firstloss.compat import patches

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOCS = os.path.join(ROOT, "docs")
PAGES = sorted(
    os.path.relpath(os.path.join(folder, name), ROOT)
    for folder, _, names in os.walk(DOCS)
    for name in names
    if name.endswith(".md")
)


def read(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        return file.read()


def reference():
    spec = importlib.util.spec_from_file_location("reference", os.path.join(DOCS, "reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page):
    """The anchors of a page's headings, as Python-Markdown's toc generates them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", read(page), flags=re.S), flags=re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "README.md", "CHANGELOG.md"])
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        full = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert os.path.exists(os.path.join(ROOT, full)), f"{page} links to {target}, which is not there"
        if page.startswith("docs"):
            assert full.startswith("docs"), f"{page} links to {target}, which is not on the site"
        if anchor and full.endswith(".md"):
            assert anchor in anchors(full), f"{page} links to {target}, and {full} has no such heading"


def test_the_site_lists_every_page():
    listed = re.findall(r": ([\w/-]+\.md)$", read("mkdocs.yml"), flags=re.M)
    listed += re.findall(r"^ +- ([\w/-]+\.md)$", read("mkdocs.yml"), flags=re.M)
    assert sorted(os.path.join("docs", *page.split("/")) for page in listed) == PAGES


def test_the_first_screen_says_how_much_is_patched():
    count = Counter(patch.when for patch in patches.PATCHES.values())
    said = f"{count[patches.DEFERRED] + count[patches.IMPORTED]} functions of PyTorch are patched, during a capture "
    said += f"{count[patches.CAPTURE]} more, and while a step is traced {count[patches.TRACE]} more"
    assert said in read("README.md")


def test_the_architecture_page_is_short():
    assert len(read("docs/architecture.md").split()) < 1200


def test_every_public_name_is_on_a_page():
    module = reference()
    module.check()
    assert module.table().keys() == set(fl.__all__)
    for name in fl.__all__:
        assert any(re.search(rf"^## fl\.{name}(\.\w+)?$", read(page), flags=re.M) for page in PAGES), name
    for name in module.PAGES:
        assert f"docs/reference/{name}.md" in PAGES and f"]({name}.md)" in read("docs/reference/index.md"), name


@pytest.mark.parametrize("names, said", [(("trace",), "on more than one: ['trace']"), ((), "on no page: ['Pad'")])
def test_a_name_on_no_page_or_on_two_is_reported(names, said, monkeypatch):
    module = reference()
    steps = [name for name in module.PAGES["steps"] if name != "Pad" or names]
    monkeypatch.setitem(module.PAGES, "steps", (*steps, *names))
    with pytest.raises(ValueError, match=re.escape(said)):
        module.check()


@pytest.mark.parametrize("page", PAGES)
def test_samples_are_valid_python(page):
    for block in re.findall(r"```python\n(.*?)```", read(page), flags=re.S):
        ast.parse(textwrap.dedent(block))


def test_the_quick_start_runs(tmp_path, monkeypatch, capsys):
    """All its samples in one program, in order, as a reader would type them."""
    blocks = re.findall(r"```python\n(.*?)```", read("docs/index.md"), flags=re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("\n".join(blocks))
    space = {"__name__": "train"}
    exec(compile("\n".join(blocks), str(tmp_path / "train.py"), "exec"), space)
    assert space["trainer"].state.step == 96
    assert sum(bool(line.strip()) for line in blocks[0].split("x = torch.randn")[1].splitlines()) < 15
    assert (tmp_path / "model_dir" / "checkpoints" / "step_96").is_dir()


def test_the_quick_start_runs_on_eight_devices(tmp_path):
    """With what the last step of the tutorial writes in place of the backend that the Trainer makes."""
    page = read("docs/index.md")
    (code, *_) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (backend,) = re.findall(r"^trainer = Trainer\((backend=.*), \.\.\.\)$", page, flags=re.M)
    code = "import firstloss as fl\n" + code.replace("trainer = Trainer(", f"trainer = Trainer({backend}, ")
    code += "\nassert next(trainer.model.parameters()).numel() and fl.backend().mesh.devices.size == 8\n"
    (tmp_path / "train.py").write_text(code)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}  # which JAX reads when it is imported
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


# Section of docs/trainers.md -> what runs its diffs against the real package: a test, or an example and its test.
DIFFS = {
    "Your own loop, FSDP2, DDP": ["tests/integrations/test_libraries.py::test_two_ranks"],
    "A script for the meta device": ["tests/test_doc_samples.py::test_samples_run"],
    "transformers, peft": [
        "tests/integrations/test_libraries.py::test_transformers_trainer",
        "tests/init/test_loading.py::test_from_pretrained",
        "tests/integrations/test_libraries.py::test_transformers_tensor_parallel",
    ],
    "accelerate": [
        "tests/integrations/test_libraries.py::test_accelerate_prepare",
        "tests/integrations/test_libraries.py::test_accelerate_load_checkpoint_and_dispatch",
    ],
    "Lightning": ["tests/integrations/test_libraries.py::test_lightning"] * 2,
    "torchtitan": ["tests/integrations/test_scripts.py::test_torchtitan"],
    "nanoGPT, nanochat": [
        "tests/integrations/test_scripts.py::test_nanogpt",
        "tests/integrations/test_scripts.py::test_nanochat",
    ],
    "DeepSpeed": ["tests/integrations/test_libraries.py::test_deepspeed_zero_3"],
    "Pipeline stages": ["tests/integrations/test_pipeline.py::test_training_by_a_schedule"],
    "Load a checkpoint": ["tests/init/test_loading.py::test_each_rank_reads_its_own"] * 2,
}
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", read("docs/trainers.md"), flags=re.S | re.M))


@pytest.mark.parametrize("section", SECTIONS)
def test_each_trainer_changes_one_line_that_a_test_runs(section):
    text = SECTIONS[section]
    diffs = re.findall(r"```diff\n(.*?)```", text, flags=re.S)
    assert len(diffs) == len(DIFFS.get(section, ())), "each diff has a test"
    for diff in diffs:
        added = [line for line in diff.splitlines() if line.startswith("+")]
        assert len(added) == 1 and "fl.deferred" in added[0], diff
    for test in DIFFS.get(section, ()):
        file, _, function = test.partition("::")
        assert f"\ndef {function}(" in read(file), test
    for named in re.findall(r"examples/(\w+)\.py", text):
        tests = "".join(
            read(f"tests/integrations/{f}.py") for f in ("test_libraries", "test_pipeline", "example_ranks")
        )
        assert os.path.exists(os.path.join(ROOT, "examples", f"{named}.py")) and named in tests, named


def test_diffs_are_on_that_page_only():
    assert DIFFS.keys() <= SECTIONS.keys()
    assert [page for page in PAGES if "```diff" in read(page)] == [os.path.join("docs", "trainers.md")]


# Pages that a program writes, and the program.
GENERATED = {
    "docs/operations.md": "tests/lower/coverage_page.py",
    "docs/model-steps.md": "tests/lower/model_page.py",
    "docs/torch-tests.md": "tests/torch_tests/page.py",
    "docs/compatibility.md": "tests/compat/page.py",
    "docs/cstorch-names.md": "tests/cstorch/names.py",
}


def test_what_people_read_is_short():
    """Everything that was written by hand has at most 20,000 words, code and tables included."""
    assert all(os.path.exists(os.path.join(ROOT, file)) for file in GENERATED.values())
    pages = [page for page in [*PAGES, "README.md", "CHANGELOG.md"] if page.replace(os.sep, "/") not in GENERATED]
    assert sum(len(read(page).partition(reference().MARK)[0].split()) for page in pages) <= 20_000


def test_the_reference_is_what_the_docstrings_say():
    """If not, run `python docs/reference.py`."""
    module = reference()
    module.check()
    writer = module.Writer()
    for page in module.PAGES:
        after = read(f"docs/reference/{page}.md").partition(module.MARK)[2]
        assert after == f"\n{writer.page(page)}", page


def messages():
    """(error or warning, part of its message) as quoted on the troubleshooting page."""
    text = re.sub(r"\s+", " ", read("docs/troubleshooting.md"))
    return [
        (name, piece.strip(" ."))
        for name, message in re.findall(r"`(\w+(?:Error|Warning)): ([^`]*)`", text)
        for piece in re.split(r"\.\.\.|\bModel\b", message)
        if piece.strip(" .")
    ]


@pytest.mark.parametrize("name, piece", messages())
def test_messages_quoted_in_troubleshooting_exist(name, piece):
    assert hasattr(fl.errors, name)
    source = ""
    for folder, _, names in os.walk(os.path.join(ROOT, "src")):
        source += "".join(read(os.path.join(folder, each)) for each in names if each.endswith(".py"))
    assert piece in re.sub(r'"\s+f?"', "", re.sub(r"\{[^{}]*\}", "", source)), f"{name}: no code says {piece!r}"


def test_all_hooks_of_the_trainer_are_listed():
    from firstloss.trainer import Callback

    page = read("docs/trainer.md")
    for name in vars(Callback):
        assert not name.startswith("on_") or f"`{name}`" in page, name
