"""`[mlflow] upload`: whole artifacts of named nodes, file by file, after everything else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from toy_ops import PIPELINE, Toy
from tracked_toy import artifacts, child, client_of, ids, newest_record, send, tracked_toy

from dsl.errors import PipelineError
from dsl.read_toml import read_graph
from executor.records.run_record import Record
from executor.system.trust import trust_store
from executor.tracking.contents import FILE_LIMIT, UPLOADED, Reference
from executor.tracking.mlflow_client import HeldRun, Tracker
from executor.tracking.replay import Replay
from executor.tracking.sync_state import lacks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CALLED = '(stage.out_dir / "text.txt").write_text(joined)'
LARGE = CALLED + "".join(
    f'\n    (stage.out_dir / "large{place}.bin").write_bytes(bytes({FILE_LIMIT} + 1))' for place in (1, 2)
)
WHOLE = [f"artifact/{name}" for name in ("large1.bin", "large2.bin", "text.txt")]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """Run once, with nothing sent."""
    made = tracked_toy(tmp_path, f'{PIPELINE}\n[mlflow]\nupload = ["c"]\n', tracked=False)
    source = (made.folder / "toy_join.py").read_text()
    (made.folder / "toy_join.py").write_text(source.replace(CALLED, LARGE))
    trust_store(made.store)
    assert 0 == made.dflow("run", str(made.file)).returncode
    return made


def uploaded(toy: Toy, node: str = "c") -> list[str]:
    found = artifacts(client_of(toy), ids(newest_record(toy))[1][node])
    return [name for name in found if name.startswith("artifact/")]


def test_the_whole_artifact_of_a_named_node_is_sent_and_its_size_is_said(toy: Toy) -> None:
    record, said = newest_record(toy), list[str]()
    assert Replay(toy.store, record, say=said.append).send() is None
    assert WHOLE == uploaded(toy)
    assert ["uploading the artifact of c to MLflow: 3 files, 2.1 MB"] == said
    assert "3 files, 2.1 MB" == child(toy, record, "c").data.tags["dflow.uploaded"]
    assert "dflow.uploaded" not in child(toy, record, "b").data.tags
    publisher = Replay(toy.store, record, say=said.append)
    assert (None, 0, 1) == (publisher.send(), publisher.counts["files"], len(said)), "once"


def test_while_a_run_goes_on_a_file_at_a_time_is_sent(toy: Toy) -> None:
    record = Record.load(newest_record(toy))
    record.state.status = "running"
    record.save()
    publisher = Replay(toy.store, record.folder, is_live=True)
    for count in (2, 3):  # the small one came with the end of its node
        assert publisher.send() is None
        assert (count, count == 3) == (len(uploaded(toy)), UPLOADED in child(toy, record.folder, "c").data.tags)


def test_an_upload_that_was_broken_off_goes_on_with_the_next_file(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    log_files, names = Tracker.log_files, list[str]()

    def breaks(self: Tracker, held: HeldRun, files: Mapping[str, Path], references: Mapping[str, Reference]) -> None:
        if list(files) == ["artifact/large2.bin"]:
            raise OSError("the line is cut")
        log_files(self, held, files, references)

    def counts(self: Tracker, held: HeldRun, files: Mapping[str, Path], references: Mapping[str, Reference]) -> None:
        names.extend(name for name in files if len(files) == 1)
        log_files(self, held, files, references)

    monkeypatch.setattr(Tracker, "log_files", breaks)
    warning = Replay(toy.store, newest_record(toy)).send()
    assert warning is not None and "the line is cut" in warning
    monkeypatch.setattr(Tracker, "log_files", counts)
    send(toy, newest_record(toy))
    assert ["artifact/large2.bin"] == [name for name in names if name.startswith("artifact/")]
    assert WHOLE == uploaded(toy)


def test_an_artifact_from_the_store_that_its_run_uploaded_is_not_sent_again(toy: Toy) -> None:
    send(toy, newest_record(toy))
    assert 0 == toy.dflow("run", str(toy.file), "-s", "d.steps=7").returncode
    send(toy, newest_record(toy))
    assert [] == uploaded(toy)
    assert not lacks(Record.load(newest_record(toy)))


def test_an_artifact_with_a_link_in_it_is_not_sent(toy: Toy, tmp_path: Path) -> None:
    record = newest_record(toy)
    digest = toy.state()["nodes"]["c"]["digest"]
    folder = toy.store / "objects" / digest
    folder.chmod(0o755)
    (tmp_path / "secret").write_text("not to be sent")
    (folder / "large1.bin").unlink()
    (folder / "large1.bin").symlink_to(tmp_path / "secret")
    warning = Replay(toy.store, record).send()
    assert (
        "MLflow lacks the artifact of c: artifact/large1.bin is missing, or a link: see `dflow doctor --verify`"
        == warning
    )
    assert ["artifact/text.txt"] == uploaded(toy)


def test_a_node_that_is_not_there_is_a_mistake_of_the_file_with_its_line(tmp_path: Path) -> None:
    toy = Toy(tmp_path, f'{PIPELINE}\n[mlflow]\nupload = ["c", "dd"]\n')
    with pytest.raises(PipelineError) as caught:
        read_graph(toy.file)
    line = toy.file.read_text().splitlines().index('upload = ["c", "dd"]') + 1
    assert f'{toy.file}:{line}:1: mlflow.upload: there is no node "dd" (did you mean "d"?)' == str(caught.value)


def test_templates_stand_for_their_copies_and_a_part_of_a_pipeline_uploads_its_own_nodes(tmp_path: Path) -> None:
    toy = Toy(tmp_path, f'{PIPELINE}\n[mlflow]\nupload = ["c", "d"]\n[sweep]\nc.weight = [1.0, 2.0]\n')
    graph = read_graph(toy.file)
    copies = [node for node in graph.nodes.values() if node.copy is not None and node.copy.template == "c"]
    assert [True, True] == [graph.is_uploaded(node) for node in copies]
    assert not graph.is_uploaded(graph.nodes["a"])
    assert ("c",) == graph.up_to([copies[0].id]).upload
