"""`flexgen diff` on real repositories: each distinct change once, its architectures, and the right cause."""

from __future__ import annotations

import json
import shutil

import pytest
from project import SPECS, Project

from flexgen.compiler import UsageError
from flexgen.diff import show
from flexgen.diff.report import Report, compare
from flexgen.diff.sides import made, other

EPS = "rms: {kind: rms, cast: before, eps: eps}"


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def diff(project: Project, against: str | None = None) -> Report:
    return compare(other(project.folder, against), made(project.folder))


def summary(report: Report) -> dict[str, tuple[str, ...]]:
    """The first changed line of each group to `kind file:where` of its causes."""
    return {
        (group.first.added or group.first.removed or ("",))[0].strip(): tuple(
            f"{cause.kind} {cause.file}:{cause.where}" for cause in group.causes
        )
        for group in report.groups
        if group.first.file != "manifest.json"
    }


def test_nothing_changed_is_proved(project):
    project.commit()
    for against in (None, "HEAD", str(project.folder), str(project.folder / "generated")):
        report = diff(project, against)
        assert not report and report.files == 12 and report.packages == 3
        assert show.text(report).startswith("no difference: ") and "12 files of 3 packages" in show.text(report)
    assert json.loads(show.as_json(report))["equal"] is True


ATTEND = "o_TNH = attend(q_TNH, w, pages, step, scale={})  # reads K/V pages"


def test_a_changed_number_of_one_spec(project):
    project.commit()
    project.edit("specs/llama.yaml", "rope: rope, bias: attention_bias}", "rope: rope, scale: 0.5, bias: attention_bias}")
    report = diff(project, "HEAD")
    assert summary(report) == {ATTEND.format("0.5"): ("spec specs/llama.yaml:attention.full.scale",)}
    (group,) = (group for group in report.groups if group.first.file == "attention.py")
    assert group.architectures == ["llama"] and group.first.removed == (f"    {ATTEND.format('dims.head_dim ** -0.5')}",)
    assert "specs/llama.yaml: attention.full.scale (new: 0.5)" in show.text(report)
    assert not [group for group in report.groups if group.first.file == "manifest.json"]  # its digests only follow


def test_the_same_change_of_all_specs_is_one_hunk(project):
    project.commit()
    for name in SPECS:
        project.edit(f"specs/{name}.yaml", EPS, EPS.replace("before", "after"))
    report = diff(project, "HEAD")
    walker = [group for group in report.groups if group.first.file == "walker.py" and group.first.within == "full_layer"]
    text = show.text(report)
    assert "specs/llama.yaml, specs/qwen3.yaml, specs/qwen3_moe.yaml: norms.rms.cast (before -> after)" in text
    assert {len(group.architectures) for group in report.groups} >= {3}
    assert all(cause.where == "norms.rms.cast" for group in walker for cause in group.causes)


def test_template_lines_and_spec_paths_are_told_apart(project):
    project.commit()
    project.edit("templates/walker/dims.j2", '"""The numbers of one checkpoint."""', '"""What one checkpoint binds."""')
    project.edit("specs/qwen3.yaml", "mlp: {size: size, act: silu}", "mlp: {size: size, act: relu}")
    found = summary(diff(project, "HEAD"))
    line = (project.folder / "templates/walker/dims.j2").read_text().split("What one")[0].count("\n") + 1
    assert found['"""What one checkpoint binds."""'] == (f"template templates/walker/dims.j2:{line}",)
    (relu,) = (causes for text, causes in found.items() if "relu" in text)
    assert relu == ("spec specs/qwen3.yaml:mlp.mlp.act",)
    assert len(found) == 2


def test_changes_that_need_each_other_are_found_together(project):
    project.commit()
    project.edit("specs/llama.yaml", "  mlp_bias: mlp_bias\n", "  mlp_bias: mlp_bias\n  half: 0.5\n")
    project.edit("specs/llama.yaml", "bias: attention_bias}", "bias: attention_bias, scale: half}")
    causes = summary(diff(project, "HEAD"))[ATTEND.format("dims.half")]
    assert causes == ("spec specs/llama.yaml:dims.half", "spec specs/llama.yaml:attention.full.scale")


def test_hand_edits_of_the_checked_in_code(project):
    project.edit("generated/llama/walker.py", "dims.eps", "1e-3")
    project.commit()
    for against in (None, "HEAD"):
        report = diff(project, against)
        (group,) = report.groups
        assert [cause.kind for cause in group.causes] == ["hand edit"] and group.architectures == ["llama"]


def test_a_change_of_the_compiler_is_neither(project):
    """The same specs and templates once made other code, and the manifest vouches for it."""
    import hashlib

    path = project.folder / "generated/llama/merge.py"
    path.write_text(path.read_text() + "# an older compiler's line\n")
    manifest = project.folder / "generated/llama/manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["merge.py"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    assert [cause.kind for cause in diff(project, str(project.folder / "generated")).groups[0].causes] == ["unknown"]
    project.commit()
    assert [cause.kind for group in diff(project).groups for cause in group.causes] == ["compiler"]


def test_packages_that_come_and_go(project):
    project.commit()
    (project.folder / "specs/qwen3.yaml").rename(project.folder / "specs/other.yaml")
    project.edit("specs/other.yaml", "name: qwen3", "name: other")
    report = diff(project, "HEAD")
    causes = {(g.first.architecture, g.first.whole): {(c.file, c.where) for c in g.causes} for g in report.groups}
    assert causes == {
        ("other", "added"): {("specs/other.yaml", "new")},
        ("qwen3", "removed"): {("specs/qwen3.yaml", "removed")},
    }
    assert "(added: " in show.text(report)


def test_missing_and_stray_files(project):
    (project.folder / "generated/llama/merge.py").unlink()
    (project.folder / "generated/qwen3/stray.py").write_text("x = 1\n")
    found = {(g.first.architecture, g.first.file): (g.first.whole, g.causes[0].kind) for g in diff(project).groups}
    assert found == {("llama", "merge.py"): ("added", "hand edit"), ("qwen3", "stray.py"): ("removed", "hand edit")}


def test_another_project_as_the_other_side(project, tmp_path_factory):
    copy = tmp_path_factory.mktemp("other") / "project"
    shutil.copytree(project.folder, copy)
    project.edit("specs/llama.yaml", EPS, EPS.replace("before", "after"))
    assert {cause.where for group in diff(project, str(copy)).groups for cause in group.causes} == {"norms.rms.cast"}


def test_old_sources_that_this_compiler_refuses(project):
    """What cannot be taken back to see is still named, as probable."""
    project.edit("specs/llama.yaml", EPS, EPS.replace("before", "never"))
    project.edit("generated/llama/walker.py", "rms_norm_cast_before", "rms_norm_cast_never")
    project.commit()
    project.edit("specs/llama.yaml", EPS.replace("before", "never"), EPS)
    report = diff(project, "HEAD")
    assert {(c.where, c.proven) for g in report.groups for c in g.causes} == {("norms.rms.cast", False)}
    assert "[1] probably specs/llama.yaml: norms.rms.cast (never -> before)" in show.text(report)


def test_many_changes_are_reported_by_file(project, monkeypatch):
    from flexgen.diff import causes

    monkeypatch.setattr(causes, "MAX_CHANGES", 0)
    project.commit()
    project.edit("specs/llama.yaml", EPS, EPS.replace("before", "after"))
    assert {(c.file, c.where) for g in diff(project, "HEAD").groups for c in g.causes} == {("specs/llama.yaml", "")}


def test_a_project_in_a_folder_of_a_repository(tmp_path):
    whole = Project(tmp_path / "repository" / "deep")
    outer = Project.__new__(Project)
    outer.folder = tmp_path / "repository"
    outer.commit()
    whole.edit("specs/llama.yaml", EPS, EPS.replace("before", "after"))
    report = diff(whole, "HEAD")
    assert report.packages == 3 and {c.where for g in report.groups for c in g.causes} == {"norms.rms.cast"}


def test_line_ends_are_no_difference(project):
    for path in [*project.folder.glob("generated/*/*"), *project.folder.glob("specs/*"), *project.folder.rglob("*.j2")]:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert not diff(project)


def test_markdown_folds_what_is_long_and_cannot_be_broken_out_of(project):
    project.commit()
    long = "\n".join(f"# <b>line</b> {n} ```" for n in range(120))
    project.edit("templates/merge.py.j2", "MERGES:", long + "\nMERGES:")
    text = show.markdown(diff(project, "HEAD"))
    assert text.count("<details>") == 1 and text.count("</details>") == text.count("<details")
    assert "more lines" in text and "````diff" in text
    assert "templates/merge.py.j2:" in text and text.startswith("**Generated code:** 1 distinct change of 1 cause in 3 architectures")


def test_one_cause_is_one_entry_with_all_its_places(project):
    project.commit()
    project.edit("specs/llama.yaml", EPS, EPS.replace("before", "after"))
    project.edit("templates/merge.py.j2", "MERGES:", "# Another line.\nMERGES:")
    report = diff(project, "HEAD")
    assert len(report.entries) < len(report.groups) and sum(entry.hunks for entry in report.entries) == sum(
        len(group.hunks) for group in report.groups
    )
    llama = next(entry for entry in report.entries if entry.architectures == ["llama"])
    assert llama.hunks > 2 and llama.bookkeeping and all(not group.first.is_bookkeeping for group in llama.groups)
    text = show.text(report)
    table = text.split("\n[1] ")[0]
    assert table.count("specs/llama.yaml: norms.rms.cast (before -> after)") == 1 and "templates/merge.py.j2:" in table
    assert "  imports of walker.py, llama: -from" in text.split("norms.rms.cast (before -> after)\n")[2]
    page = show.markdown(report)
    assert "<details open" not in page and page.count("<details>") == len(report.entries)
    assert len(page) < 65_536


def test_refusals(project, tmp_path_factory):
    with pytest.raises(UsageError, match="no git repository"):
        other(project.folder, "main")
    project.commit("trunk")
    with pytest.raises(UsageError, match=r"neither a directory nor a commit.*did you mean `trunk`"):
        other(project.folder, "trnk")
    with pytest.raises(UsageError, match="is no generated package, holds none"):
        other(project.folder, str(tmp_path_factory.mktemp("empty")))
    with pytest.raises(UsageError, match="is a file"):
        other(project.folder, str(project.folder / "specs/llama.yaml"))


def test_exit_codes_and_formats(project):
    project.commit()
    assert project.flexgen("diff").returncode == 0
    project.edit("specs/llama.yaml", EPS, EPS.replace("before", "after"))
    assert project.flexgen("diff", "HEAD").returncode == 1
    parsed = json.loads(project.flexgen("diff", "--format", "json").stdout)
    assert parsed["version"] == 1 and not parsed["equal"]
    cause = parsed["changes"][0]["causes"][0]
    assert cause == {
        "kind": "spec", "file": "specs/llama.yaml", "where": "norms.rms.cast", "was": "before", "now": "after", "proven": True,
    }  # fmt: skip
    bad = project.flexgen("diff", "nope")
    assert bad.returncode == 2 and "neither a directory nor a commit" in bad.stderr
    no_git = project.flexgen("diff", "HEAD", PATH="/nonexistent")
    assert no_git.returncode == 2 and "git is not on the PATH" in no_git.stderr
    assert project.flexgen("diff", "--format", "json", PATH="/nonexistent").returncode == 1  # without a commit, no git
    project.edit("specs/llama.yaml", "cast: after", "cast: afer")
    wrong = project.flexgen("diff")
    assert wrong.returncode == 3 and "did you mean `after`" in wrong.stderr
