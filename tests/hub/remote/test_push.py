"""Push: a whole export, once, in one commit with a tag, whatever the Hub does meanwhile (hub_double.py, by LFS)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hub_double import TOKEN, Fault

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub.exporting.export import export
from equimoe.hub.format.manifest import whole_export
from equimoe.hub.remote import follow as following
from equimoe.hub.remote import push as pushing
from equimoe.hub.remote import repository
from equimoe.hub.remote.follow import follow
from equimoe.hub.remote.push import push
from equimoe.model.init import leaves_by_path

ME = ("model", "me/tiny")


@pytest.fixture(scope="module")
def exports(tiny, tmp_path_factory):
    """Of step 4 in one file, of step 12 in shards."""
    folder = tmp_path_factory.mktemp("exports")
    export(tiny.run, folder / "4", step=4, verified=False)
    export(tiny.run, folder / "12", step=12, max_shard_bytes=10_000, verified=False)
    return folder


@pytest.fixture
def four(exports, tmp_path) -> Path:
    return Path(shutil.copytree(exports / "4", tmp_path / "four"))


@pytest.fixture
def twelve(exports, tmp_path) -> Path:
    return Path(shutil.copytree(exports / "12", tmp_path / "twelve"))


@pytest.fixture(autouse=True)
def slept(monkeypatch) -> list[float]:
    """What `patiently` would have waited."""
    waits = []
    monkeypatch.setattr(repository, "time", SimpleNamespace(sleep=waits.append))
    return waits


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def on_hub(hub, revision="main") -> dict[str, bytes]:
    return {name: raw for name, raw in hub.files("me/tiny", revision=revision).items() if name != ".gitattributes"}


def titles(hub) -> list[str]:
    return list(hub.repositories[ME].titles.values())


# What is there afterwards.


def test_a_new_repository_with_one_commit_and_a_tag(hub, four):
    lines = []
    pushed = push(four, "me/tiny", log=lines.append)
    assert on_hub(hub) == on_hub(hub, "step-4") == contents(four)
    assert titles(hub) == ["initial commit", "Step 4 of finished"]
    assert (pushed.commit, pushed.tag) == (hub.commit("me/tiny", "model"), "step-4")
    assert pushed.uploaded and not pushed.private
    assert pushed.url.endswith("/me/tiny/tree/step-4")
    assert lines[:2] == ["me/tiny: made, public", f"reading {four}, to compare every file with its manifest"]
    assert lines[2].startswith(f"warning: {four} was exported with --no-verify")
    assert lines[-1] == 'use it: equimoe sample me/tiny "Once upon a time"' and lines[-2] == pushed.url
    assert TOKEN not in "".join(lines)


def test_what_was_pushed_can_be_loaded_by_its_name_and_tag(hub, four, twelve):
    push(four, "me/tiny")
    push(twelve, "me/tiny")
    for revision, folder in ((None, twelve), ("step-4", four)):
        ours, theirs = equimoe.load(folder)[0], equimoe.load("me/tiny", revision=revision)[0]
        pairs = zip(leaves_by_path(ours).items(), leaves_by_path(theirs).items(), strict=True)
        assert all(a == b and np.array_equal(x, y) for (a, x), (b, y) in pairs)


def test_once_more_is_no_commit_and_sends_nothing(hub, four):
    first = push(four, "me/tiny")
    hub.asked.clear()
    lines = []
    again = push(four, "me/tiny", log=lines.append)
    assert (again.commit, again.uploaded) == (first.commit, False) and len(titles(hub)) == 2
    assert "me/tiny has this export already, tagged step-4: nothing to do" in lines
    assert {method for method, _, _ in hub.asked} == {"GET"}
    named = push(four, "me/tiny", tag="best")  # another name of the same commit
    assert (named.commit, named.uploaded, len(titles(hub))) == (first.commit, False, 2)
    assert hub.repositories[ME].tags == {"step-4": first.commit, "best": first.commit}


def test_the_next_checkpoint_takes_away_the_weights_before_and_nothing_else(hub, four, twelve):
    first = push(four, "me/tiny")
    hub.push("me/tiny", {**hub.files("me/tiny"), "loss.png": b"x", "gguf/model.safetensors": b"y"}, "model")
    lines = []
    second = push(twelve, "me/tiny", log=lines.append)
    assert on_hub(hub) == {**contents(twelve), "loss.png": b"x", "gguf/model.safetensors": b"y"}
    assert "deleting weights of the export before: model.safetensors" in lines
    assert on_hub(hub, "step-4") == contents(four)
    assert hub.repositories[ME].tags == {"step-4": first.commit, "step-12": second.commit}
    assert titles(hub)[-1] == "Step 12 of finished" and len(titles(hub)) == 4
    lines.clear()
    old = push(four, "me/tiny", log=lines.append)  # still there, under its tag
    assert (old.commit, old.uploaded) == (first.commit, False) and len(titles(hub)) == 4
    assert f"main of me/tiny has gone on since, to {second.commit[:8]}" in lines


def test_a_tag_at_another_export_is_refused_before_anything_is_sent(hub, four, twelve):
    push(four, "me/tiny")
    hub.asked.clear()
    with pytest.raises(EquimoeError, match=r"tag \('step-4'\): is at another export in me/tiny \(\w{8}\).*--tag NAME"):
        push(twelve, "me/tiny", tag="step-4")
    assert {method for method, _, _ in hub.asked} == {"GET"}


def test_a_card_that_was_edited_on_the_hub_stays(hub, four, twelve):
    push(four, "me/tiny")
    hub.push("me/tiny", {**hub.files("me/tiny"), "README.md": b"# Mine"}, "model")
    lines = []
    assert push(four, "me/tiny", log=lines.append).uploaded is False  # the tag still has it
    push(twelve, "me/tiny", log=lines.append)
    assert on_hub(hub) == {**contents(twelve), "README.md": b"# Mine"}
    assert f"README.md was edited on the Hub and stays; the new one is in {twelve}" in lines
    assert push(twelve, "me/tiny").uploaded is False


def test_a_card_that_was_pushed_follows_the_export(hub, four, twelve):
    push(four, "me/tiny")
    push(twelve, "me/tiny")
    assert on_hub(hub)["README.md"] == (twelve / "README.md").read_bytes() != (four / "README.md").read_bytes()


def test_private(hub, four):
    assert push(four, "lab/hidden", private=True).private
    assert hub.repositories["model", "lab/hidden"].private
    lines = []
    push(four, "lab/hidden", log=lines.append)
    assert "lab/hidden is private, and stays so" in lines and hub.repositories["model", "lab/hidden"].private
    push(four, "me/tiny")
    with pytest.raises(EquimoeError, match=r"repo \('me/tiny'\): is public already, and --private asks"):
        push(four, "me/tiny", private=True, tag="other")


# What is not pushed.


def test_strangers_in_the_folder_stay_here(hub, four):
    (four / "notes.txt").write_text("secret")
    (four / ".lock").touch()
    (four / "runs").mkdir()
    lines = []
    push(four, "me/tiny", log=lines.append)
    assert "not sent, as the manifest does not list it: .lock, notes.txt, runs" in lines
    assert on_hub(hub).keys() == whole_export(four).files.keys()


def cut(folder):
    os.truncate(folder / "model.safetensors", 100)


def change(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def leave_out(folder):
    (folder / "config.json").unlink()


def link(folder):
    target = folder.parent / "config.json"
    (folder / "config.json").rename(target)
    (folder / "config.json").symlink_to(target)


def stop_before_the_end(folder):
    (folder / "manifest.json").unlink()


def edited(change):
    def edit(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"model\.safetensors \('100 bytes instead of [\d,]+'\): must be as manifest\.json says; export it again"),
        (leave_out, r"config\.json \('missing'\): must be as"),
        (link, r"config\.json \('a link'\): must be as"),
        (
            stop_before_the_end,
            r"out \('.*'\): must be a complete export, and holds no manifest\.json\. .*equimoe export",
        ),
        (
            edited(lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}})),
            r"only name files of its own folder",
        ),
        (edited(lambda m: m.update(version=2)), r"must be of format equimoe-export, version 1\. Update equimoe"),
        (edited(lambda m: m.pop("files")), r"must list the source and the files"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "must hold a JSON object"),
    ],
)
def test_what_is_not_a_whole_export_is_refused_without_the_network(hub, four, damage, message):
    damage(four)
    with pytest.raises(EquimoeError, match=message):
        push(four, "me/tiny")
    assert hub.asked == []


def test_a_byte_that_is_another_is_found_before_anything_is_sent(hub, four):
    change(four)
    with pytest.raises(EquimoeError, match=r"model\.safetensors \('another sha256'\): must be as"):
        push(four, "me/tiny")
    assert titles(hub) == ["initial commit"] and hub.count("POST", "me/tiny") == 0


@pytest.mark.parametrize("there", [False, True])
def test_who_may_not_write_is_told_before_a_byte_is_read_or_exported(hub, four, tiny, tmp_path, monkeypatch, there):
    if there:
        hub.push("you/tiny", {}, "model")
    monkeypatch.setattr(pushing, "whole_export", pytest.fail)
    monkeypatch.setattr(following, "export", pytest.fail)
    for act in (push, lambda out, repo: list(follow(tiny.run, out, repo))):
        with pytest.raises(EquimoeError, match=r"repo \('you/tiny'\): could not be pushed .* \(403\)"):
            act(four, "you/tiny")


@pytest.mark.parametrize(
    "repo", ["tiny", "me/tiny/x", "me/", "/tiny", "me/ti ny", "me/--x", "../tiny", "mé/tiny", "me/x.git"]
)
def test_names_that_the_hub_does_not_take(hub, four, repo):
    with pytest.raises(EquimoeError, match=r"repo \('.*'\): must be org/name"):
        push(four, repo)
    assert hub.asked == []


@pytest.mark.parametrize("tag", ["", "main", "a b", "x..y", "-x", "x.lock", "x/y", "x."])
def test_what_is_no_tag(hub, four, tag):
    with pytest.raises(EquimoeError, match=r"tag \('.*'\): must be letters"):
        push(four, "me/tiny", tag=tag)
    assert hub.asked == []


def test_who_is_not_logged_in_or_may_not_write(hub, four, monkeypatch):
    with pytest.raises(EquimoeError, match=r"repo \('you/tiny'\): could not be pushed .* \(403\)\. `hf auth login`"):
        push(four, "you/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(EquimoeError, match=r"refuses that to the login here \(401\)") as error:
        push(four, "me/tiny")
    assert "hf_wrong" not in str(error.value)
    monkeypatch.delenv("HF_TOKEN")
    hub.asked.clear()
    with pytest.raises(EquimoeError, match=r"there is no login here\. Log in with `hf auth login`, or set HF_TOKEN"):
        push(four, "me/tiny")
    assert hub.asked == [] and not hub.repositories


# What goes wrong meanwhile.


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("PUT", "/lfs/", 500, times=3)],
        [Fault("PUT", "/lfs/", "drop", times=2)],
        [Fault("PUT", "/lfs/", "corrupt")],  # the store answers 422
        [Fault("PUT", "/lfs/", 403)],  # the signed address is too old
        [Fault("GET", "/api/models/me/tiny$", 502)],
        [Fault("POST", "/api/repos/create", 503)],
        [Fault("POST", "/preupload/", 500), Fault("POST", "/objects/batch", "drop")],
        [Fault("POST", "/commit/", 500, times=2)],
        [Fault("POST", "/commit/", "lost")],
        [Fault("POST", "/commit/", 429)],
        [Fault("GET", "/tree/", "drop"), Fault("GET", "/tree/", 500)],
        [Fault("POST", "/tag/", "lost")],
        [Fault("POST", "/tag/", 500)],
        [Fault("GET", "/refs", 500, times=2)],
    ],
    ids=lambda faults: "-".join(f"{fault.path.strip('/')}-{fault.kind}".replace("/", "_") for fault in faults),
)
def test_a_failure_that_passes_ends_well_and_once(hub, four, faults):
    hub.faults += faults
    pushed = push(four, "me/tiny")
    assert all(fault.times == 0 for fault in faults)
    assert on_hub(hub, "step-4") == contents(four) and pushed.uploaded
    assert titles(hub) == ["initial commit", "Step 4 of finished"]


def test_the_hub_says_how_long_to_wait(hub, four, slept):
    hub.faults.append(Fault("POST", "/commit/", 429))
    lines = []
    push(four, "me/tiny", log=lines.append)
    assert slept == [3.0] and "the Hub did not do it (status 429); again in 3 s" in lines


def test_an_upload_that_broke_off_goes_on(hub, twelve):
    shards = sorted(path.name for path in twelve.glob("*.safetensors"))
    assert len(shards) > 3
    hub.faults.append(Fault("PUT", "/lfs/", 500, times=10_000))
    with pytest.raises(
        EquimoeError, match=r"repo \('me/tiny'\): could not be pushed to the Hub \(500: .*Check the network"
    ):
        push(twelve, "me/tiny")
    assert titles(hub) == ["initial commit"] and hub.repositories[ME].tags == {}
    hub.faults[:] = [Fault("POST", "/commit/", 403)]
    with pytest.raises(EquimoeError, match=r"\(403\)"):
        push(twelve, "me/tiny")
    assert titles(hub) == ["initial commit"]
    hub.asked.clear()
    push(twelve, "me/tiny")
    assert hub.count("PUT", "/lfs/") == 0 and on_hub(hub, "step-12") == contents(twelve)


def test_a_wrong_checksum_that_stays_is_an_error_and_no_commit(hub, four):
    hub.faults.append(Fault("PUT", "/lfs/", "corrupt", times=10_000))
    with pytest.raises(EquimoeError, match=r"could not be pushed to the Hub \(422: .*model\.safetensors"):
        push(four, "me/tiny")
    assert titles(hub) == ["initial commit"] and hub.repositories[ME].tags == {}


def test_somebody_else_commits_meanwhile(hub, four, monkeypatch):
    """The files of both are there."""
    commit = repository.Repository.commit

    def late(self, *arguments, **named):
        monkeypatch.setattr(repository.Repository, "commit", commit)
        hub.push("me/tiny", {**hub.files("me/tiny"), "loss.png": b"x"}, "model")
        return commit(self, *arguments, **named)

    monkeypatch.setattr(repository.Repository, "commit", late)
    push(four, "me/tiny")
    assert on_hub(hub, "step-4") == {**contents(four), "loss.png": b"x"}


def test_a_file_that_changes_while_it_is_sent_is_not_tagged(hub, four, monkeypatch):
    commit = repository.Repository.commit

    def changed(self, *arguments, **named):
        change(four)
        return commit(self, *arguments, **named)

    monkeypatch.setattr(repository.Repository, "commit", changed)
    with pytest.raises(EquimoeError, match=r"holds something else after the commit \w{8} in model\.safetensors"):
        push(four, "me/tiny")
    assert hub.repositories[ME].tags == {}


def test_no_network_and_offline(hub, four, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    lines = []
    with pytest.raises(EquimoeError, match=r"could not be pushed to the Hub \(ConnectError: .*Check the network"):
        push(four, "me/tiny", log=lines.append)
    assert "the Hub did not do it (ConnectError); again in 60 s" in lines
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EquimoeError, match=r"must be pushed to the Hub, but HF_HUB_OFFLINE is set\. Unset it"):
        push(four, "me/tiny")


# A run that trains.


@pytest.fixture
def run(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny.run, tmp_path / "run"))


def follow_all(run, out, **settings):
    return [p.tag for p in follow(run, out, "me/tiny", verified=False, poll_seconds=0.0, **settings)]


def test_follow_pushes_every_checkpoint_oldest_first(hub, run, tmp_path):
    lines = []
    assert follow_all(run, tmp_path / "out", log=lines.append) == ["step-4", "step-8", "step-12"]
    assert titles(hub) == ["initial commit", "Step 4 of run", "Step 8 of run", "Step 12 of run"]
    assert list((tmp_path / "out").iterdir()) == []
    assert f"{tmp_path / 'out' / 'step-8'} is removed" in lines
    commits = len(hub.repositories[ME].commits)
    hub.asked.clear()
    assert follow_all(run, tmp_path / "out") == []  # all there: nothing is exported again
    assert {method for method, _, _ in hub.asked} == {"GET"} and len(hub.repositories[ME].commits) == commits


def test_follow_waits_for_the_last_step(hub, run, tmp_path, monkeypatch):
    last = run / "checkpoints" / "12"
    hidden = last.rename(tmp_path / "12")
    sleeps = []

    def trained_meanwhile(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 2:
            hidden.rename(last)

    monkeypatch.setattr(following, "time", SimpleNamespace(sleep=trained_meanwhile))
    pushed = follow(run, tmp_path / "out", "me/tiny", verified=False, keep=True, poll_seconds=7.0)
    assert [p.tag for p in pushed] == ["step-4", "step-8", "step-12"] and sleeps == [7.0, 7.0]
    assert on_hub(hub) == contents(tmp_path / "out" / "step-12")


def test_follow_stops_at_ctrl_c_and_goes_on(hub, run, tmp_path, monkeypatch):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    lines = []
    pushed = follow(run, tmp_path / "out", "me/tiny", verified=False, log=lines.append)
    assert next(pushed).tag == "step-4"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(following, "export", interrupted)
        next(pushed)
    assert lines[-1] == "stopped; the same command goes on with what is not on the Hub yet"
    assert follow_all(run, tmp_path / "out") == ["step-8", "step-12"]


def test_follow_leaves_out_what_the_run_removes(hub, run, tmp_path, monkeypatch):
    real, lines = following.export, []

    def removed(run, folder, *, step, **settings):
        if step == 8:
            shutil.rmtree(run / "checkpoints" / "8")
            (folder.parent / f".export-{folder.name}").mkdir()
        return real(run, folder, step=step, **settings)

    monkeypatch.setattr(following, "export", removed)
    assert follow_all(run, tmp_path / "out", log=lines.append) == ["step-4", "step-12"]
    assert "step 8: left out, as the run removed it before it was exported" in lines
    assert list((tmp_path / "out").iterdir()) == []


def test_follow_does_not_set_main_back(hub, run, tmp_path):
    export(run, tmp_path / "8", step=8, verified=False)
    push(tmp_path / "8", "me/tiny")
    lines = []
    assert follow_all(run, tmp_path / "out", log=lines.append) == ["step-12"]
    assert "step 4: left out, as main is at step 8 already" in lines


def test_follow_refuses_tags_of_another_run(hub, run, twelve, tmp_path):
    (run / "checkpoints" / "12" / "state" / "other").touch()
    push(twelve, "me/tiny")
    with pytest.raises(EquimoeError, match=r"tag \('step-12'\): is in me/tiny already, and not at the checkpoint of"):
        follow_all(run, tmp_path / "out")


def test_follow_outlasts_a_hub_that_is_down(hub, run, tmp_path):
    hub.faults += [Fault("POST", "/commit/", 503, times=6), Fault("GET", "/refs", 500, times=6)]
    lines = []
    assert follow_all(run, tmp_path / "out", log=lines.append) == ["step-4", "step-8", "step-12"]
    assert sum("tried again in 0 s" in line for line in lines) == 2
    assert titles(hub) == ["initial commit", "Step 4 of run", "Step 8 of run", "Step 12 of run"]


# The command.


def test_the_command_prints_json_and_tells_the_rest_to_stderr(hub, four, monkeypatch, capsys):
    from equimoe.cli import app

    for arguments, uploaded in ((["--tag", "v1"], True), ([], False)):
        monkeypatch.setattr("sys.argv", ["equimoe", "push", str(four), "me/tiny", *arguments, "--json"])
        with pytest.raises(SystemExit) as stop:
            app.main()
        out, err = capsys.readouterr()
        assert stop.value.code in (0, None) and json.loads(out)["uploaded"] is uploaded
        assert json.loads(out)["repo"] == "me/tiny" and "use it: equimoe sample me/tiny" in err
    monkeypatch.setattr("sys.argv", ["equimoe", "push", str(four), "me/tiny", "--tag", "x", "--follow", "tiny"])
    with pytest.raises(SystemExit) as stop:
        app.main()
    assert stop.value.code == 2 and "--tag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "again"), [("404 Not Found", False), ("403 Forbidden", False), ("429 Too Many", True)]
)
def test_a_refusal_of_xet_is_no_network_that_fails(status, again):
    error = ConnectionError(f"Network error: Request error: HTTP status client error ({status}), domain: http://x/y")
    assert repository.passes(error) is again
