"""The first cell of a database's notebook: the code of the <sql> tool in the jail. Imports nothing of this package."""

import sqlite3

STEPS_PER_LOOK = 10_000
MAX_CELL_CHARS = 200
"""Longest value shown. A longer value is cut, and ends in an ellipsis."""
OUTSIDE = {"random", "randomblob", "load_extension", "fts3_tokenizer"}
"""Functions that read state outside the process. A branch or a replay would read other values."""
DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}  # files last for one call only
NOW = "2025-01-01 00:00:00"
"""Each database's clock stands at this time. A branch or a replay must read the same time as the first run."""
TIME_VALUES = {"date": 0, "time": 0, "datetime": 0, "julianday": 0, "unixepoch": 0, "strftime": 1, "timediff": 0}
"""Functions of dates, with the position of the first time among the arguments."""
database = sqlite3.connect(":memory:", isolation_level=None)
dates = sqlite3.connect(":memory:")
"""A second database to call SQLite's own date functions with the time of our clock."""
problem = ""


def authorize(action, first, second, *_):
    is_outside = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in OUTSIDE
    return sqlite3.SQLITE_DENY if action in DENIED or is_outside else sqlite3.SQLITE_OK


def chance(*_):
    """Replaces the random functions. SQLite does not ask the authorizer about functions in a column's default."""
    raise sqlite3.DatabaseError


def stop_the_clock():
    """Let every function of the current time use NOW."""
    date, time = NOW.split()
    for name, words in {"current_date": date, "current_time": time, "current_timestamp": NOW}.items():
        database.create_function(name, 0, lambda words=words: words, deterministic=True)
    for name, num_arguments in dates.execute("SELECT DISTINCT name, narg FROM pragma_function_list").fetchall():
        if name in TIME_VALUES:
            database.create_function(name, num_arguments, at_our_time(name, TIME_VALUES[name]), deterministic=True)


def at_our_time(name, place):
    def call(*values):
        values = list(values)
        if len(values) <= place or text_of(values[place]) in ("subsec", "subsecond"):
            values.insert(place, NOW)
        for at in range(place, place + 2 if name == "timediff" else place + 1):
            values[at] = NOW if text_of(values[at]) == "now" else values[at]
        return dates.execute(f"SELECT {name}({', '.join('?' * len(values))})", values).fetchone()[0]

    return call


def text_of(value):
    """Return a time as text, in the form SQLite compares with "now"."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""
    return text.partition("\0")[0].lower()


def begin(script):
    """Fill the database. If the script fails, `ask` reports the error."""
    global problem
    database.execute("PRAGMA temp_store = MEMORY")  # memory for sorting counts under our limits
    stop_the_clock()
    database.create_function("random", 0, chance)
    database.create_function("randomblob", 1, chance)
    database.set_authorizer(authorize)
    try:
        database.executescript(script)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        problem = str(error) or "out of memory"


def ask(text, max_steps, max_rows):
    """Run statements, and print the rows of the last statement with rows. Exits with the message of an error."""
    if problem:
        raise SystemExit(problem)
    looks_left = max_steps // STEPS_PER_LOOK
    shown = "(no rows)"

    def must_stop():
        nonlocal looks_left
        looks_left -= 1
        return looks_left < 0

    database.set_progress_handler(must_stop, STEPS_PER_LOOK)
    try:
        for statement in statements(text):
            cursor = database.execute(statement)
            if cursor.description:
                shown = table(cursor, max_rows)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        reason = str(error) or "out of memory"
        raise SystemExit(f"Error: {reason if looks_left >= 0 else f'more than {max_steps} steps'}") from None
    print(shown)


def table(cursor, max_rows):
    """Return the first rows as text, below the column names, in SQLite's order."""
    lines = [" | ".join(str(column[0]) for column in cursor.description)]
    for number, row in enumerate(cursor):
        if number == max_rows:
            lines.append("...")
            break
        lines.append(" | ".join(map(shown, row)))
    cursor.close()
    return "\n".join(lines)


def shown(cell):
    text = "NULL" if cell is None else str(cell)
    return text if len(text) <= MAX_CELL_CHARS else text[:MAX_CELL_CHARS] + "…"


def statements(text):
    """Split a text into statements. "a; b" -> ["a;", " b"]"""
    found = []
    start = 0
    for end in [i + 1 for i, char in enumerate(text) if char == ";"]:
        if sqlite3.complete_statement(text[start:end]):
            found.append(text[start:end])
            start = end
    return [*found, text[start:]] if text[start:].strip() else found
