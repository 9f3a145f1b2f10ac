from kybernate.dev.demo.client import Outages, Verdict, of_status, of_text


def test_the_wait_that_the_router_asks_for_is_kept() -> None:
    assert of_status(503, "3", "").retry_after_seconds == 3.0
    assert of_status(503, "Wed, 21 Oct 2030 07:28:00 GMT", "").retry_after_seconds is None


def test_only_the_whole_right_text_is_ok() -> None:
    assert of_text("right", "right", finished=True).verdict is Verdict.OK
    assert of_text("right", "right", finished=False).verdict is Verdict.ERROR
    assert "at character 2" in of_text("riGht", "right", finished=True).reason
    assert "3 characters for 5" in of_text("rig", "right", finished=True).reason


def test_outages_cover_what_overlaps_them_and_a_moment_after() -> None:
    outages = Outages(grace_seconds=1.0)
    assert not outages.overlap(0, 100)
    first = outages.begin(10)
    assert outages.overlap(5, 10)
    assert outages.overlap(50, 60)
    outages.end(first, 20)
    assert outages.overlap(20.5, 21.5)
    assert not outages.overlap(21.5, 30)
    assert not outages.overlap(0, 9)


def test_outages_that_overlap_count_once() -> None:
    outages = Outages(grace_seconds=1.0)
    assert outages.seconds(0, 100) == 0
    first = outages.begin(10)
    second = outages.begin(12)
    outages.end(first, 14)
    outages.end(second, 19)
    outages.begin(50)
    assert [outages.seconds(*span) for span in ((0, 5), (0, 11), (13, 16), (0, 30), (15, 53))] == [0, 1, 3, 10, 8]
