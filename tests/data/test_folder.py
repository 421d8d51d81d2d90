"""Laws of a folder with one file per client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sartor.core.errors import FederationError
from sartor.data import Federation, from_folder

TABLE = [[0.5, 1.0, 0], [1.5, 2.0, 1], [2.5, 3.0, 1], [3.5, 4.0, 0]]


def write_csv(path, rows=TABLE, header=("a", "b", "y")):
    lines = [",".join(map(str, row)) for row in ([header] if header else []) + list(rows)]
    path.write_text("\n".join(lines) + "\n")


def write_npz(path, rows=TABLE):
    rows = np.array(rows)
    np.savez(path, x=rows[:, :2].astype(np.float32), y=rows[:, 2].astype(int))


def write_parquet(path, rows=TABLE):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(("a", "b", "y"))}
    parquet.write_table(pa.table(columns), path)


def test_the_format_of_the_files_does_not_matter(tmp_path):
    """npz, CSV (commas or semicolons) and Parquet files of one content make one federation."""
    made = []
    for ending, write in (("npz", write_npz), ("csv", write_csv), ("parquet", write_parquet)):
        folder = tmp_path / ending
        folder.mkdir()
        for name in ("oslo", "bonn"):
            write(folder / f"{name}.{ending}")
        (folder / "README.txt").write_text("not a client")
        made.append(Federation.from_folder(folder, seed=3))
    semicolons = tmp_path / "semicolons"
    semicolons.mkdir()
    for file in (tmp_path / "csv").glob("*.csv"):
        (semicolons / file.name).write_text(file.read_text().replace(",", ";"))
    made.append(Federation.from_folder(semicolons, seed=3))
    assert made[0].names == ("bonn", "oslo")
    assert len({fed.fingerprint() for fed in made}) == 1
    assert made[1].info["columns"] == ["a", "b"]


def test_the_label_is_named_known_or_last(tmp_path):
    """A named column wins, then y or label, then the last column; a header may be absent."""
    write_csv(tmp_path / "one.csv")
    first = from_folder(tmp_path, label="a", num_classes=0)
    assert first.y.tolist() == [0.5, 1.5, 2.5, 3.5]
    write_csv(tmp_path / "one.csv", [row[::-1] for row in TABLE], ("label", "b", "a"))
    assert from_folder(tmp_path).y.tolist() == [0, 1, 1, 0]
    write_csv(tmp_path / "one.csv", header=None)
    bare = from_folder(tmp_path)
    assert bare.y.tolist() == [0, 1, 1, 0]
    assert torch.equal(bare.x, torch.tensor(TABLE)[:, :2])


def test_text_labels_are_classes_over_all_clients(tmp_path):
    """A class has the same number everywhere, also where a client has not all classes."""
    write_csv(tmp_path / "p.csv", [[1, 2, "ill"], [3, 4, "ill"]])
    write_csv(tmp_path / "q.csv", [[1, 2, "well"], [3, 4, "ill"]])
    fed = from_folder(tmp_path)
    assert fed.info["class_names"] == ["ill", "well"]
    assert fed.y.tolist() == [0, 0, 1, 0]


def test_files_may_bring_their_own_test_samples(tmp_path):
    """NAME.train and NAME.test are one client with a given split."""
    for name in ("a", "b"):
        write_csv(tmp_path / f"{name}.train.csv")
        write_csv(tmp_path / f"{name}.test.csv", TABLE[:1])
    fed = from_folder(tmp_path)
    assert fed.names == ("a", "b")
    assert fed.train.sizes.tolist() == [4, 4]
    assert fed.test.sizes.tolist() == [1, 1]


def test_all_broken_files_are_listed_with_their_reasons(tmp_path):
    """One error names every file that cannot be used and says why; good files are not named."""
    pytest.importorskip("pyarrow")
    write_csv(tmp_path / "good.csv")
    (tmp_path / "bad.npz").write_bytes(b"PK not an archive")
    np.savez(tmp_path / "keys.npz", features=np.zeros(2), y=np.zeros(2))
    np.savez(tmp_path / "length.npz", x=np.zeros((2, 2)), y=np.zeros(3))
    np.savez(tmp_path / "object.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("a,b,y\n")
    (tmp_path / "ragged.csv").write_text("a,b,y\n1,2,0\n1,2\n")
    (tmp_path / "text.csv").write_text("a,b,y\n1,2,0\n1,tall,1\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "shape.csv").write_text("a,y\n1,0\n")
    (tmp_path / "names.csv").write_text("a,c,y\n1,2,0\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(FederationError) as caught:
        from_folder(tmp_path)
    text = str(caught.value)
    for part in (
        "12 faults",
        "bad.npz cannot be used",
        "keys.npz cannot be used: it has no array 'x'",
        "length.npz cannot be used: features of shape (2, 2) do not fit labels of shape (3,)",
        "object.npz cannot be used: Object arrays",
        "empty.csv cannot be used: it is empty",
        "header.csv cannot be used: it has no samples",
        "ragged.csv cannot be used: line 3 has 2 cells instead of 3",
        "text.csv cannot be used: column 'b' holds tall in sample 1",
        "binary.csv cannot be used",
        "shape.csv has samples of shape (1,)",
        "names.csv has other columns than good.csv (unknown there: c)",
        "broken.parquet cannot be used",
    ):
        assert part in text
    assert "File good.csv" not in text


def test_bad_values_name_the_client(tmp_path):
    """NaN in a file is reported with the client's name."""
    write_csv(tmp_path / "fine.csv")
    write_csv(tmp_path / "leaky.csv", [[1, "nan", 0], [1, 2, 1]])
    with pytest.raises(FederationError, match=r"NaN .* \(client leaky\)"):
        from_folder(tmp_path)


def test_a_folder_without_clients_is_refused(tmp_path):
    """No folder, no files, or two files for one client: each error says so."""
    with pytest.raises(FederationError, match="not a folder"):
        from_folder(tmp_path / "absent")
    with pytest.raises(FederationError, match="holds no file"):
        from_folder(tmp_path)
    write_csv(tmp_path / "a.csv")
    write_npz(tmp_path / "a.npz")
    with pytest.raises(FederationError, match="Client a has several files"):
        from_folder(tmp_path)
    (tmp_path / "a.npz").unlink()
    with pytest.raises(FederationError, match="no column 'lable'"):
        from_folder(tmp_path, label="lable")
