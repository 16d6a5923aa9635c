from hybridpipe.notices import KEPT, Notices


def test_a_notice_is_printed_at_once_and_kept(capsys):
    notices = Notices()
    notices.tell("the update is skipped")
    assert capsys.readouterr().err == "hybridpipe: the update is skipped\n"
    assert notices.lines() == ["the update is skipped"]


def test_of_very_many_the_first_stay_and_the_others_are_counted(capsys):
    notices = Notices()
    for i in range(KEPT + 3):
        notices.tell(str(i))
    assert len(capsys.readouterr().err.splitlines()) == KEPT + 3
    assert notices.lines() == [*map(str, range(KEPT)), "and 3 more like these"]
