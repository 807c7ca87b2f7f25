"""The 40 prompts of ``runtime.device_check``; they are the same in every run and need no data file."""

from ..api.model import Model
from ..cli.checks.selftest import prompts as random_prompts

_LONG = 512  # most tokens of a long prompt
_EVERY = 8  # one prompt in so many is long

TEXTS = (
    "def read_lines(path):\n    with open(path) as file:\n",
    "The harbour was quiet that morning, and the only sound came from",
    "Shopping list:\n- bread\n- milk\n- two onions\n-",
    "1, 2, 4, 8, 16, 32,",
    "Write a short letter to a neighbour whose dog barks at night.",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Der Zug nach Hamburg hatte eine Stunde Verspätung, deshalb",
    "Q: Why is the sky dark at night?\nA:",
    '{"name": "lamp", "price": 12.5, "colours": ["white", "black"], "in_stock":',
    "La recette demande trois œufs, un peu de farine et",
    "Monday rain, Tuesday rain, Wednesday sun, Thursday rain, Friday",
    "SELECT name, COUNT(*) FROM orders WHERE year = 2020 GROUP BY",
    "Explain in two sentences how a bicycle stays upright.",
    "El río baja de la montaña y cruza el pueblo antes de",
    "Step 1: Unplug the machine.\nStep 2: Remove the four screws.\nStep 3:",
    "17 + 25 = 42\n36 + 48 = 84\n59 + 13 =",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "She opened the box, looked inside, and closed it again without a word. Nobody asked",
    "今天早上下了大雨，所以我们决定",
    "| city | population |\n|---|---|\n| Oslo | 700,000 |\n| Lima |",
    "Dear all,\n\nthe meeting on Thursday is moved to",
    "В старом доме у реки жил",
    "for i in range(1, 101):\n    if i % 15 == 0:\n        print('FizzBuzz')\n    elif",
    "The three main reasons why the bridge had to be closed were",
    "red red red blue red red red blue red red red",
    "朝起きると、窓の外は",
    "<html>\n<head><title>Garden tools</title></head>\n<body>\n<ul>\n<li>Spade</li>\n",
    "In the year the railway reached the valley, farmers began to",
    "function add(a, b) {\n  return a + b;\n}\n\nfunction subtract(",
    "A haiku about a kettle:\n",
    "ERROR 2021-03-04 12:00:01 disk full\nERROR 2021-03-04 12:00:02 disk full\nERROR",
    "Translate into French: The cat sleeps on the chair.\n",
    "On aurait dit que le vent avait",
    "3.14159265358979",
    "import numpy as np\n\n\ndef moving_average(values, width):\n    ",
    "Ingredients: flour, water, salt, yeast. Method: first",
    "كان الطقس جميلا في ذلك اليوم،",
    "The difference between a lake and a pond is",
    "- [x] buy paint\n- [x] move the sofa\n- [ ] paint the wall\n- [ ]",
    "Once the last guest had left, the innkeeper counted",
)


def prompts(model: Model) -> list[list[int]]:
    """Token ids of the texts above, every eighth after all texts before it; random ids if the bundle has no tokenizer."""
    if not model.bundle.has_tokenizer:
        return random_prompts(model, len(TEXTS))
    most = max(1, min(_LONG, model.bundle.manifest.capacity // 2))
    token_ids: list[list[int]] = []
    for i, text in enumerate(TEXTS):
        long = i % _EVERY == _EVERY - 1
        ids = model.encode("\n\n".join(TEXTS[: i + 1]) if long else text)
        token_ids.append(ids[-most:])
    return token_ids
