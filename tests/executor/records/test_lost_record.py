"""A run whose record is deleted while it goes on."""

import shutil

from toy_ops import Toy, wait_for


def test_it_says_so_once_stops_its_stages_and_can_be_run_again(tmp_path):
    toy = Toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "d.seconds=0.1", "-s", "d.steps=600")
    wait_for(lambda: len(toy.steps()) > 2)
    record = toy.store / "records" / toy.state()["run"]
    shutil.rmtree(record.rename(tmp_path / "gone"))  # at once, for who still writes there
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors.count("its folder is gone; was it removed while a run used it?") == 1
    assert "Traceback" not in errors
    again = toy.dflow("run", str(toy.file), "-s", "d.steps=600")
    assert (again.returncode, again.stderr) == (0, "")
    assert toy.caches() == {
        "a": ("done", "hit"),
        "b": ("done", "hit"),
        "c": ("done", "hit"),
        "d": ("done", "resumed"),
    }
