"""Three prompts of different length. In each, something that is said early decides the answer."""

from __future__ import annotations

from typing import Any

_SHORT = (
    "My sister Clara keeps bees on the roof of the old library. She has four hives, and she painted each one in its own colour: the "
    "strongest hive is yellow, the youngest hive is green, and the other two are white. Every Saturday in summer she takes the stairs "
    "up to the roof with a smoker, a veil and a jar. Last week she brought down two kilograms of honey and gave half of it to the "
    "librarians.\n\nDescribe the colours of Clara's hives, and say which one is the strongest."
)

_MEDIUM = (
    "Notes from the harbour office of Port Ellery, first week of May.\n\n"
    "Monday: The ferry Marigold is taken out of service because her left engine loses oil. Captain Osei asks for a spare pump from "
    "the yard in Granby. Until it comes, the small boat Kestrel does the morning crossing, with room for thirty people.\n"
    "Tuesday: Fog until noon. Two fishing boats wait outside the breakwater and come in after lunch. The bakery on the quay sells "
    "out of bread, as everybody is waiting for somebody.\n"
    "Wednesday: A school class from the hills visits the lighthouse. The keeper, Mr Lund, shows them the lamp and tells them about the "
    "storm of 1962, when the light burned for nine days without a pause.\n"
    "Thursday: The spare pump arrives on the evening train. It is too large for the bracket, so the smith makes a new bracket "
    "overnight and asks for nothing but a fish supper.\n"
    "Friday: A test run along the coast. The engine is quiet and dry. The harbour master signs the paper at four o'clock, and the "
    "children on the pier wave at the first regular crossing.\n\n"
    "Why was the ferry Marigold taken out of service, and how was it repaired?"
)

_LONG = (
    "We left Tarn on the ninth of March with six mules, two guides and a wooden box that nobody was allowed to open. The box belonged "
    "to Professor Adair, who had told us only that it held a brass clock for the monastery at Sel, and that the clock must never be "
    "turned upside down. She walked beside the mule that carried it and slept with one hand on its lid.\n\n"
    "The first days were easy. The road followed the river, the almond trees were in flower, and in every village somebody sold us "
    "bread, hard cheese and dried apricots. Our older guide, Ishan, knew a song for each bridge. The younger one, Pavel, knew the price "
    "of everything and never paid it. In the evenings we sat by the fire and compared our maps, which agreed about the mountains and "
    "about nothing else.\n\n"
    "On the fifth day the weather changed. A wind came down from the pass and brought first dust, then rain, then snow that was as fine "
    "as flour. We lost half a day when a mule put its foot through the ice of a stream and would not be comforted. Ishan wrapped the "
    "leg in a blanket and talked to the animal for an hour, quietly, as one talks to a child that has had a bad dream. Then it stood "
    "up and went on, and so did we.\n\n"
    "At the foot of the pass stands a stone house where travellers may wait for better weather. We shared it with a salt trader, his "
    "three sons and a very old dog. The trader told us that the bridge above the house had been carried away in the autumn and that "
    "the only way across was a rope with a basket. The mules could not go in a basket. So it was decided that Pavel would take them "
    "back to Tarn, and that the rest of us would carry what we needed on our own backs: food for four days, two tents, the maps, and "
    "the box.\n\n"
    "I remember the crossing better than I would like. The basket turned slowly in the wind, and below it the river was white and "
    "loud. Professor Adair went first, sitting very straight, with the box on her knees and both arms around it. When my own turn came "
    "I kept my eyes shut until a hand took me by the collar. On the other side the path climbed through pines, then through bare "
    "rock, and on the second evening we saw a row of lamps on the ridge and heard a bell.\n\n"
    "The monks gave us soup and asked no questions. Only the abbot, when he saw the box, put down his spoon and stood up, and for a "
    "while he did not say anything at all.\n\n"
    "What was in Professor Adair's wooden box?"
)

TEXTS: tuple[tuple[str, str], ...] = (("hives", _SHORT), ("harbour", _MEDIUM), ("box", _LONG))
"""(name, text), shortest first."""


def picture_names(prompt: str) -> dict[str, str]:
    """The files drawn for a prompt of :data:`TEXTS`, by what they show."""
    return {"coverage": f"coverage-{prompt}.png", "attention": f"attention-{prompt}.png"}


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text`` as one user turn of the model's chat, or as they are where the model has no chat template."""
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        return [int(t) for t in ids]
    return [int(t) for t in tokenizer(text)["input_ids"]]


def readable(tokenizer: Any, ids: list[int]) -> str:
    """Generated ids as text, up to the first end-of-sequence token."""
    end = getattr(tokenizer, "eos_token_id", None)
    if end in ids:
        ids = ids[: ids.index(end)]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
