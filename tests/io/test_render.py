"""The words of rows: every known schema is read completely, by training, scores and tests."""

import json

import pytest

from holdfast.io.render import Reader, rename
from holdfast.io.rows import DatasetRows

READER = Reader("d")
HALF = json.loads('"a \\ud800 b"')


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a ", "completion": "b"}, "a "),
        ({"instruction": "Add.", "input": "2, 2", "output": "4"}, "Add.\n\n2, 2"),
        ({"instruction": "Add.", "input": "", "output": "4"}, "Add."),
        ({"instruction": "Add.", "input": None, "output": "4"}, "Add."),
        ({"instruction": "Sum up.", "context": "It rains.", "response": "Rain"},
         "Sum up.\n\nIt rains."),
        ({"context": "It rains.", "question": "Dry?", "answer": "no"}, "It rains.\n\nDry?"),
        ({"passage": "It rains.", "question": "Dry?", "answer": "no"}, "It rains.\n\nDry?"),
        ({"system": "Be brief.", "prompt": "Hi", "completion": "Hi"}, "Be brief.\n\nHi"),
        ({"system_prompt": "Be brief.", "question": "Hi", "response": "Hi"}, "Be brief.\n\nHi"),
        ({"system": "S", "instruction": "I", "input": "X", "context": "C", "output": "4"},
         "S\n\nI\n\nC\n\nX"),
        ({"input": "2 + 2", "output": "4"}, "2 + 2"),
        ({"context": "C", "input": "2 + 2", "output": "4"}, "C\n\n2 + 2"),
        ({"prompt": None, "question": "Q", "answer": 4}, "Q"),
        ({"prompt": 7, "answer": 4.5}, "7"),
    ],
)  # fmt: skip
def test_a_prompt_is_complete(row, prompt):
    assert READER.kind(row, "conversation", "completion", "text") == "completion"
    assert READER.prompt(row, 0) == prompt
    assert READER.pair(row, 0)[1].strip() == str(list(row.values())[-1])
    READER.warn_of_unused([row], "completion")  # warnings are errors


def test_a_question_with_choices_has_its_context():
    row = {"context": "C", "question": "Q", "choices": ["a", "b"], "label": "1"}
    assert READER.prompt(row, 0) == "C\n\nQ"
    assert READER.choices(row, 0) == (["a", "b"], 1)
    READER.warn_of_unused([row], "choice")


def test_a_system_prompt_beside_a_conversation():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first = {"role": "system", "content": "S"}
    assert READER.messages({"messages": turns}, 0) == turns
    assert READER.messages({"messages": turns, "system": None}, 0) == turns
    assert READER.messages({"messages": turns, "system": "S"}, 0) == [first, *turns]
    own = {"role": "system", "content": "T"}
    assert READER.messages({"messages": [own, *turns], "system": "S"}, 0) == [own, *turns]
    READER.warn_of_unused([{"messages": turns, "system": "S"}], "conversation")


ASK, SAY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"name": "add", "arguments": {"x": 2}}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
         [ASK, SAY]),
        ({"conversations": [ASK, SAY]}, [ASK, SAY]),
        ({"messages": json.dumps([ASK, SAY])}, [ASK, SAY]),  # a cell of a CSV file
        ({"messages": [{**ASK, "name": None}, SAY]}, [ASK, SAY]),  # a null of Arrow
        ({"prompt": [ASK], "completion": [SAY]}, [ASK, SAY]),  # of TRL
        ({"conversations": [{"from": "observation", "value": "4"}]},
         [{"role": "tool", "content": "4"}]),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {**CALL, "arguments": '{"x": 2}'}}]}]},
         [{"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}]),
    ],
)  # fmt: skip
def test_conversations_of_other_formats(row, turns):
    assert READER.kind(row, "completion", "conversation") == "conversation"
    assert READER.messages(row, 0) == turns
    READER.warn_of_unused([row], "conversation")


def test_tools_of_a_conversation():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for given in (tools, json.dumps(tools), [{**tools[0], "strict": None}]):
        assert READER.conversation({"messages": [ASK, SAY], "tools": given}, 0).tools == tools
    for none in (None, [], ""):
        assert READER.conversation({"messages": [ASK, SAY], "tools": none}, 0).tools is None
    with pytest.raises(ValueError, match="d: tools of row 2 must be a list of tools"):
        READER.conversation({"messages": [ASK, SAY], "tools": "add"}, 2)


RENAMED = [
    ({"question": "Q", "passage": "P", "answer": True, "n": 1},
     {"text1": "question", "text2": "passage", "label": "answer"}, "labeled",
     {"text1": "Q", "text2": "P", "label": True, "n": 1}),
    ({"problem": "Q", "solution": "A", "messages": [], "prompt": "no"},
     {"question": "problem", "answer": "solution"}, "completion", {"question": "Q", "answer": "A"}),
    ({"task": "Add.", "input": "2, 2", "output": "4"}, {"instruction": "task"}, "completion",
     {"instruction": "Add.", "input": "2, 2", "output": "4"}),
    ({"body": "B", "text": "no", "question": "Q", "answer": "A", "label": 1}, {"text": "body"},
     "labeled", {"text": "B", "label": 1}),
    ({"a": "B", "sentence1": "x", "sentence2": "y", "gold": "z"}, {"text": "a", "label": "gold"},
     "labeled", {"text": "B", "label": "z"}),
    ({"chat": [ASK], "text": "no"}, {"messages": "chat"}, "conversation", {"messages": [ASK]}),
    ({"question": "A", "answer": "Q"}, {"question": "answer", "answer": "question"}, "completion",
     {"question": "Q", "answer": "A"}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "columns", "kind", "renamed"), RENAMED)
def test_a_column_map_decides_the_kind(row, columns, kind, renamed):
    (found,) = rename([row], columns, "d")
    assert found == renamed
    assert READER.kind(found, "conversation", "choice", "completion", "labeled", "text") == kind
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    (table,) = rename(DatasetRows(datasets.Dataset.from_list([row])), columns, "d")
    assert table == found


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"txt": "a"}, "a column map has no name 'txt'; did you mean 'text'"),
        ({"text": "aa"}, "d has no column 'aa'; did you mean 'a'"),
        ({"question": "a", "answer": "a"}, "gives a column two names: question=a answer=a"),
        ({"text1": "a"}, "no kind of row consists of text1: give a question and an answer"),
        ({"text": "a", "messages": "b"}, "no kind of row consists of text, messages"),
    ],
)
def test_column_maps_that_do_not_fit(columns, message):
    with pytest.raises(ValueError, match=message):
        rename([{"a": "x", "b": "y"}], columns, "d")


def test_other_data_need_not_have_the_columns_of_a_map():
    rows = [{"question": "Q", "answer": "A"}]
    columns = {"text1": "question", "text2": "passage", "label": "answer"}
    assert rename(rows, columns, "d", optional=True) == rows


def test_words_that_are_not_used_are_named():
    rows = [{"text": "a", "label": 1, "n": 3}, {"text": "a", "topic": "b", "notes": ["c"]}]
    with pytest.warns(UserWarning, match="d: columns that are not used: topic, notes"):
        READER.warn_of_unused(rows, "text")
    with pytest.warns(UserWarning, match="d: columns that are not used: title"):
        READER.warn_of_unused([{"sentence": "a", "label": "x", "title": "b"}], "labeled")
    with pytest.warns(UserWarning, match="d: columns that are not used: text, output"):
        READER.warn_of_unused([{"text": "a", "prompt": "b", "answer": "c", "output": "d"}],
                              "completion")  # fmt: skip


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (READER.text, {"text": None}, "d: text of row 3 must be text, got null"),
        (READER.text, {"text": ["a"]}, r"d: text of row 3 must be text, got \['a'\]"),
        (READER.text, {"text": float("nan")}, "d: text of row 3 must be text, got nan"),
        (READER.text, {"prompt": "a"}, "row 3 needs one of the columns text, sentence"),
        (READER.text, {"text": HALF}, r"d: text of row 3 holds '\\ud800', half of a surrogate"),
        (READER.pair, {"prompt": None, "answer": "a"}, "prompt of row 3 must be text, got null"),
        (READER.pair, {"prompt": "a", "answer": None}, "answer of row 3 must be text, got null"),
        (READER.pair, {"text": "a"}, "row 3 needs one of the columns prompt, question"),
        (READER.messages, {"messages": None}, "messages of row 3 must be a list of turns"),
        (READER.messages, {"messages": "Hello"}, "messages of row 3 must be a list of turns"),
        (READER.messages, {"messages": ["Hello"]}, "messages of row 3 must be a list of turns"),
        (READER.messages, {"messages": [{"content": "a"}]}, 'each with a "role"'),
        (READER.messages, {"messages": [{"role": "user"}]}, 'each with a "role" and a "content"'),
        (READER.messages, {"text": "a"}, "row 3 needs one of the columns messages"),
        (
            READER.messages,
            {"messages": [{"role": "user", "content": HALF}]},
            "a message of row 3 holds",
        ),
        *(
            (READER.choices, {"choices": ["a", "b"], "label": label}, f"from 0 to 1, got {shown}")
            for label, shown in [(1.7, "1.7"), ("A", "'A'"), (None, "None"), (2, "2"), (-1, "-1"),
                                 (10**23, "1000"), (10**400, "1000")]
        ),
        (READER.choices, {"choices": ["a", None], "label": 0}, "a choice of row 3 must be text"),
    ],
)  # fmt: skip
def test_words_that_are_missing(read, row, message):
    with pytest.raises(ValueError, match=message):
        read(row, 3)


def test_a_template_needs_all_of_its_columns():
    assert READER.prompt({"a": "x", "b": 2}, 0, "{a} and {b}") == "x and 2"
    with pytest.raises(ValueError, match="does not fit row 4, which has the columns a"):
        READER.prompt({"a": "x", "b": None}, 4, "{a} and {b}")
    with pytest.raises(ValueError, match="does not fit row 4"):
        READER.prompt({"a": "x"}, 4, "{a.nothing} and {a:q}")
