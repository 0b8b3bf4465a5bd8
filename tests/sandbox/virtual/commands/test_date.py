"""`date` parses and prints as GNU date does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare, Run

SCRIPTS = [
    "date -d '2024-01-31 +3 days' +%F", "date -d '2024-01-31 3 days' +%F",
    "date -d '2024-01-31 3 days ago' +%F", "date -d '2024-01-31 -1 day' +%F",
    "date -d '2024-01-31 +1 month' +%F", "date -d '2024-02-29 +1 year' +%F",
    "date -d '2024-01-15 next month' +%F", "date -d '2024-01-15 last week' +%F",
    "date -d '2024-01-15 10:00 +3 hours' '+%F %T'",
    "date -d '2024-01-15 10:00:00 +3 days' '+%F %T'",
    "date -d '2024-01-15 10:00:00 3 days' '+%F %T'",
    "date -d '2024-01-15 10:00:00 UTC + 90 minutes' '+%F %T'",
    "date -d '2024-01-15T10:30:00Z' '+%F %T %Z'",
    "date -d '2024-01-15T10:30:00+02:00' '+%F %T %Z'",
    "date -d '2024-01-15T10:30:00.123456789Z' +%N",
    "date -d '2024-01-15 10:30:00 -0500' '+%F %T'", "date -d '15 Jan 2024' +%F",
    "date -d 'Jan 15 2024' +%F", "date -d 'January 15, 2024' +%F",
    "date -d 'Mon, 15 Jan 2024 10:00:00 GMT' +%s", "date -d 'Mon Jan 15 10:00:00 UTC 2024' +%s",
    "date -d '15-Jan-2024' +%F", 'date -d 01/15/2024 +%F', 'date -d 2024/01/15 +%F',
    'date -d 20240115 +%F', "date -d '20240115T103000' +%F", "date -d '20240115 10:30' '+%F %T'",
    'date -d @0', "date -d @1700000000 '+%F %T'", 'date -d @1700000000.5 +%N',
    "date -d @-1 '+%F %T'", "date -ud '1970-01-01 00:00:01 UTC' +%s",
    "date -d '2024-02-30'; echo $?", "date -d '2024-13-01'; echo $?", 'date -d foo; echo $?',
    "date -d '' +%T", "date -d 'today' +%F", "date -d 'now' +%F", "date -d 'tomorrow' +%F",
    "date -d 'yesterday' +%F", "date -d 'yesterday 10:00' '+%F %T'",
    "date -d 'tomorrow noon' +%T", "date -d '10:00 tomorrow' '+%F %T'",
    "date -d 'next monday' +%F", "date -d 'monday' +%F", "date -d 'last friday' +%F",
    "date -d 'friday' '+%F %T'", "date -d 'next friday 10:00' '+%F %T'", "date -d 'sunday' +%F",
    "date -d 'this thursday' +%F", "date -d 'monday next week' +%F", "date -d '1 week ago' +%F",
    "date -d '2 weeks' +%F", "date -d '+1 day' +%F", "date -d '-1 day' +%F",
    "date -d '1 day' +%F", "date -d '1 month ago' +%F", "date -d 'next year' +%Y",
    "date -d 'last month' +%m", "date -d '3 hours ago' +%F-%H", "date -d '90 seconds ago' +%F-%H",
    "date -d '1 year 2 months 3 days ago' +%F", "date -d '2024-01-01 1 year 2 months 3 days' +%F",
    "date -d 'fortnight ago' +%F", "date -d '3pm' +%T", "date -d '3:30 pm' +%T",
    "date -d '12am' +%T", "date -d '2024-01-15 3:30 PM' +%T", "date -d 'third monday' +%F",
    "TZ=America/New_York date -d '2024-07-01 12:00 UTC' '+%F %T %Z %z'",
    "TZ=America/New_York date -d '2024-03-10 01:30 +1 day' '+%F %T %Z'",
    "TZ=America/New_York date -d '2024-03-10 01:30 1 hour' '+%F %T %Z'",
    "TZ=Asia/Kolkata date -d @0 '+%T %Z %z %:z %::z'", "TZ=UTC-3 date -d @0 '+%T %z'",
    'date -d \'TZ="America/New_York" 2024-01-15 10:00\' \'+%F %T %Z\'',
    "date -d 2024-01-05 '+%a|%A|%b|%B|%c|%C|%d|%D|%e|%F|%g|%G|%h|%H|%I|%j|%k|%l|%m|%M|%N|%p'",
    "date -d 2024-01-05 '+%P|%q|%r|%R|%s|%S|%T|%u|%U|%V|%w|%W|%x|%X|%y|%Y|%z|%Z|%%|%n|%t'",
    "date -d 2024-12-30 '+%G-W%V-%u %U %W %j'", "date -d 2023-01-01 '+%G-W%V-%u %U %W %j'",
    "date -d 2024-01-05 '+%-d %_d %-m %^a %^B %#p %10Y %-j %_j %3N %6N %05d %_5d'",
    "date -d 2024-01-05 '+%Q %:: %E'", "date -d '2024-01-05 09:08:07' '+%-H:%-M:%-S %k %l %I%p'",
    'date -I -d 2024-01-05', 'date -Iseconds -d 2024-01-05', 'date -Ins -d 2024-01-05',
    'date -Ihours -d 2024-01-05', 'date --iso-8601=minutes -d 2024-01-05',
    'date --iso-8601 -d 2024-01-05', 'date -R -d 2024-01-05',
    'date --rfc-3339=seconds -d 2024-01-05', 'date --rfc-3339=ns -d 2024-01-05',
    'date -u -d 2024-01-05', 'date -d 2024-01-05', 'date -r nothere; echo $?',
    "date '+%Y' x; echo $?", 'date x; echo $?', "date --date='2024-01-05 10:00' +%H",
    "date --date '2 days ago' +%F", "date +%s | grep -c '^[0-9]*$'",
    'date -d "$(date +%F) 00:00:00" +%T', "date -d '2024-01-15 10:00 EST' +%T",
    "date -d '2024-01-15 24:00' ; echo $?", "date -d '1.5 hours'; echo $?",
    "date -d '2024-01-15 +1 week' +%F", "date -d '2024-01-15 + 1 week' +%F",
    "date -d '2024-01-15 1 week 2 days ago' +%F", "date -d '2024-01-15 yesterday' +%F",
    "date -d '2024-01-15 tomorrow' +%F", "date -d '12/25' +%m-%d", "date -d 'Dec 25' +%m-%d",
    "date -d '25 December' +%m-%d", "date -d 'Dec 25 10:00' '+%m-%d %T'",
    "date -d 'last day' +%F", "date -d '2024-03-01 -1 day' +%d",
    "date -d '2024-03-01 - 1 day' +%d", "date -d '2024-03-01 1 day ago' +%d",
    "date -d '2024-W03-1'; echo $?", "date -d '2024-01' ; echo $?", "date -d '10:00:60' +%T",
    "date -d '2024-01-15 10:00:00.5 +1 sec' '+%T.%N'", "date -d 'noon' +%T",
    "date -d 'midnight' +%T", "date -d 'Mon Jan 15 10:00:00 UTC 2024' +%s",
    'date -d \'TZ="America/New_York" 2024-01-15 10:00\' \'+%F %T %Z\'',
    "date -d '1.5 hours'; echo $?", "date -d '1.5 seconds' +%F",
    "date -d 'Jan 15 10:00 2023' '+%F %T'", "date -d '2024-01-15 10' '+%F %T'",
    "date -d '1030' '+%T'", "date -d '9' '+%T'",
    "touch -d '2020-01-01 10:00' f.txt; date -r f.txt",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_date_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)


async def test_current_time_has_nanoseconds(run: Run) -> None:
    result = await run("date +%s%N")
    assert len(result.stdout.strip()) == 19


async def test_clock_cannot_be_set(run: Run) -> None:
    result = await run("date -s '2020-01-01'")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Operation not permitted" in result.stderr


@pytest.mark.parametrize("zone", ["../../etc/passwd", "/etc/passwd", "Nowhere/Land", "America"])
async def test_unknown_zone_is_utc(zone: str, run: Run) -> None:
    result = await run(f"TZ={zone} date -d @0 +%T%z")
    assert result.stdout == "00:00:00+0000\n"


@pytest.mark.parametrize(
    "text", ["@99999999999999999999", "99999-01-01", "9" * 5000, "1 " * 2000, "99999999 years"]
)
async def test_absurd_dates_are_refused(text: str, run: Run) -> None:
    result = await run(f"date -d '{text}'")
    assert result.exit_code == 1
    assert "invalid date" in result.stderr
