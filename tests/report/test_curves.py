from torchecho.report.curves import plot_curves


def picture(lines):
    return [line.split("|")[1] for line in lines if "|" in line]


def test_curves_that_coincide_are_one():
    lines = plot_curves({"untouched": [3.0, 2.0, 1.0], "budget": [3.0, 2.0, 1.0]}, height=3)
    assert picture(lines) == ["#", " #", "  #"]
    assert "u untouched, b budget; # where they meet" in lines[-1]
    assert "steps 1 to 3" in lines[-1]


def test_curves_that_part_show_their_own_marks():
    lines = plot_curves({"untouched": [3.0, 1.0], "budget": [3.0, 2.0]}, height=3)
    assert picture(lines) == ["#", " b", " u"]


def test_the_axis_is_labelled_from_highest_to_lowest():
    labels = [float(line.split("|")[0]) for line in plot_curves({"a": [4.0, 2.0]}, height=3) if "|" in line]
    assert labels == [4.0, 3.0, 2.0]


def test_long_curves_keep_their_ends():
    lines = picture(plot_curves({"a": [float(n) for n in range(1000)]}, width=10, height=2))
    assert lines[0].rstrip().endswith("a")
    assert len(lines[0]) == 10
    assert lines[1].startswith("a")


def test_flat_short_and_empty_curves():
    assert picture(plot_curves({"a": [1.0, 1.0]}, height=2)) == ["aa", ""]
    assert picture(plot_curves({"a": [1.0]}, height=2)) == ["a", ""]
    assert plot_curves({"a": []}) == []
