import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = {".md", ".png"}
VERSION = re.search(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def python(*arguments, cwd, path=None):
    """Outside this checkout: with `path` alone as PYTHONPATH, and pip without a network."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True)


def succeed(*arguments, **options):
    done = python(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("sparseflash", "masks", "tests", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__", *(["data", "runs"] if name == "experiments" else []))
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    succeed("-m", "build", "--no-isolation", "--wheel", "--outdir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_masks_is_reachable_from_an_uninstalled_checkout():
    assert os.readlink(ROOT / "sparseflash" / "masks") == os.path.join("..", "masks")


def test_the_name_masks_alone_is_refused():
    done = python("-c", "import masks", cwd=ROOT)
    assert done.returncode != 0
    last_line = done.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError") and "sparseflash.masks" in last_line


def test_wheel_holds_every_file_of_the_library_and_nothing_else(wheel):
    expected = set()
    for package, name in ((ROOT / "sparseflash", "sparseflash"), (ROOT / "masks", "sparseflash/masks")):
        for folder, folders, files in os.walk(package, followlinks=False):
            folders[:] = [f for f in folders if f != "__pycache__"]
            inside = Path(name, Path(folder).relative_to(package))
            expected |= {str(inside / f) for f in files if not f.startswith(".") and Path(f).suffix not in PAGES}
    assert {"sparseflash/py.typed", "sparseflash/masks/py.typed"} <= expected

    dist_info = f"sparseflash-{VERSION}.dist-info"
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names} == {"sparseflash", dist_info}
    assert {name for name in names if not name.startswith(dist_info)} == expected
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            assert not stat.S_ISLNK(entry.external_attr >> 16), f"{entry.filename} is a link"


def test_installed_wheel_imports_and_states_its_version(wheel, tmp_path):
    succeed("-m", "pip", "install", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    shown = succeed(
        "-c",
        "import importlib.metadata as m, sparseflash, sparseflash.masks as masks\n"
        "print(sparseflash.__file__, masks.__file__, m.version('sparseflash'), sep='\\n')\n"
        "print(getattr(sparseflash, '__version__', m.version('sparseflash')))",
        cwd=tmp_path,
        path=tmp_path / "site",
    ).splitlines()
    package = tmp_path / "site" / "sparseflash"
    assert shown == [str(package / "__init__.py"), str(package / "masks" / "__init__.py"), VERSION, VERSION]


def test_the_folder_of_a_clone_is_not_taken_for_an_editable_install(source, tmp_path):
    """Beside a clone Python finds its folder before an editable install of it."""
    site, beside = tmp_path / "site", tmp_path / "beside"
    succeed("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", site, "-e", source, cwd=tmp_path)
    beside.mkdir()
    (beside / "sparseflash").symlink_to(source)
    # -S: packages can be imported, but not editable installs.
    packages = os.pathsep.join([str(site), *(entry for entry in sys.path if entry.endswith("-packages"))])
    program = f"import site; site.addsitedir({str(site)!r})\n"
    names = ("analysis", "attention", "decode", "interop", "masks", "nn", "scores", "testing")
    succeed("-S", "-c", f"{program}from sparseflash import {', '.join(names)}", cwd=tmp_path, path=packages)
    for name in names:
        program += f"try:\n    from sparseflash import {name}\nexcept ImportError as error:\n    print(error)\n"
    errors = succeed("-S", "-c", program, cwd=beside, path=packages).splitlines()
    assert len(errors) == len(names) and len(set(errors)) == 1
    assert re.match("sparseflash must be the installed package; got the folder .*, because .*: start Python", errors[0])
    assert f" {beside / 'sparseflash'}, " in errors[0]


def test_the_changelog_and_the_citation_name_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) - (\S+)$", changelog, re.MULTILINE)
    citation = dict(re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert newest.groups() == (VERSION, citation["date-released"]) and citation["version"] == VERSION


def test_the_package_page_has_the_readme_without_links_to_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"sparseflash-{VERSION}.dist-info/METADATA"))
    assert metadata["Author"] == "The sparseflash authors" and metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Author"] in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    page, readme = metadata.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Tutorial" in page and "from sparseflash import" in page and len(page) > len(readme) / 2
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links == [each for each in re.findall(r"\]\(([^)]*)\)", readme) if re.match("https?://|#", each)]


def test_the_workflows_take_actions_by_their_commit_and_packages_from_one_index():
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        used = re.findall(r"uses: (.*)", text)
        assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in used)
        assert "INDEX_URL" not in text and "index-url" not in text


def test_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    succeed("-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path, source, cwd=tmp_path)
    sdist = tmp_path / f"sparseflash-{VERSION}.tar.gz"
    with tarfile.open(sdist) as archive:
        inside = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert {"tests", "experiments", "docs"} & inside == set() and {"sparseflash", "masks", "setup.py"} <= inside
    succeed("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, sdist, cwd=tmp_path)
    (rebuilt,) = tmp_path.glob("*.whl")
    assert names_in(rebuilt) == names_in(wheel)
