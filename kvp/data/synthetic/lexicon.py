"""Words of the generated prose and dialogues: written for kvp, plain English, no digits or hyphens.

Names of people and towns are split-specific, so that a sentence with a name belongs to one split;
common words are shared. Left out on purpose: every word of RULER's templates that matters there
("magic", "variable", "chain").
"""

from __future__ import annotations

WOMEN = {
    "train": "Mara Elin Tova Ruth Nadia Iris Clara Hedda Sonja Amara Leila Marta Petra Olga Wanda "
    "Edith Flora Greta Ingrid Judith Kamala Lucia Miriam Noor Paola Rosa Selma Thea Una Vera "
    "Yasmin Zora Agnes Beatrix Celia Dora",
    "validation": "Alma Brenna Corinne Delia Esther Fatima Gwen Hilda Isolde Jelena Lotte Mina",
    "test": "Annika Bianca Carmen Dilara Eira Frida Gemma Helga Imke Jana Lena Maud",
}
MEN = {
    "train": "Anton Bruno Casper Dario Emil Felix Gustav Hugo Ivan Jonas Karim Lars Milo Nils Omar "
    "Pablo Quentin Rafael Stefan Tomas Ulrich Viktor Walter Yusuf Zeno Albert Bela Conrad Dmitri "
    "Edgar Farid Georg Harold Isaac Jakob Leon",
    "validation": "Arno Basil Cyril Dennis Elias Florian Gideon Henrik Ismael Joris Kurt Matti",
    "test": "Aldo Bertram Curtis Dragan Enzo Fergus Gerald Hassan Igor Julian Kasper Oskar",
}
TOWN_HEADS = {
    "train": "Elder Ash Thorn Wood Stone Mill Hazel Raven Winter Copper Salt Long Oak Fern Lark",
    "validation": "Birch Heron Silver Marsh North Clay",
    "test": "Maple Falcon Amber Moss West Flint",
}
TOWN_TAILS = "mere wick ford dale haven stead brook combe holt bury"

JOBS = """baker tailor sailor teacher farmer nurse carpenter gardener miller fisherman weaver doctor
singer clerk soldier hunter shepherd potter blacksmith cook printer mason glazier librarian
merchant ferryman beekeeper cobbler judge mayor student musician painter pilot plumber butcher"""
TOOLS = """lantern key map letter compass basket rope hammer kettle notebook mirror whistle knife
bucket blanket ladder ring coin purse flute drum saw needle candle clock telescope umbrella satchel
box jar spade violin hat coat scarf boot bell ticket photograph wheel net brush hook chest lamp
parcel passport painting sword cup bowl"""
ANIMALS = """dog cat horse donkey goat sheep cow hen goose fox hare owl crow rabbit pony mule duck
sparrow badger otter mouse hedgehog squirrel heron pigeon lizard frog"""
SPOTS = """market harbour mill bakery school library church bridge station orchard barn tower garden
forest inn workshop square well chapel farm river lighthouse quarry cellar theatre hospital stable
bathhouse meadow vineyard castle ferry dock museum bank kitchen courtyard"""
FOODS = """bread cheese soup honey apples pears plums butter porridge cake stew beans rice onions
cabbage fish ham eggs jam nuts carrots mushrooms cherries pancakes potatoes salt pepper tea milk
cider"""
ADJECTIVES = """old small large heavy light bright dark quiet noisy broken clean dusty narrow wide
round crooked wooden iron copper silver golden plain painted empty full cheap costly rare common
strange useful lovely ugly smooth rough soft hard sharp blunt warm cold damp dry rusty polished
borrowed forgotten hidden familiar foreign ancient modern delicate sturdy simple clever odd faded
yellow green blue red white black grey brown purple pale"""
MOODS = """happy sad tired proud angry calm nervous hopeful lonely grateful curious bored afraid
cheerful worried patient jealous ashamed relieved surprised confident stubborn restless doubtful"""
MANNERS = """slowly quickly quietly carefully gladly proudly sadly gently firmly politely bravely
eagerly calmly secretly patiently suddenly warmly kindly nervously cheerfully silently wearily"""
TIMES = """in the morning|before noon|after lunch|in the evening|late at night|at dawn|at sunset|
on the next day|a week later|that same afternoon|when the bells rang|on market day|in early spring|
during the harvest|in the middle of winter|after the storm|before breakfast|at the end of the day|
on the first day of the month|as soon as the rain stopped|while the others slept|some years ago|
on a windy afternoon|just after midnight|at the beginning of summer|between two showers"""
WEATHERS = """rain was falling|the sun was shining|snow covered the roofs|a cold wind blew|
fog lay over the fields|thunder rolled in the distance|the sky was clear|the clouds hung low|
the heat was hard to bear|frost had drawn flowers on the windows|a warm breeze came from the south|
the first leaves were falling|the moon was full|the air smelled of smoke|the streets were wet|
hail drummed on the tiles|the stars were out|mist rose from the water"""
REASONS = """the road was blocked|the shop had closed|nobody else was at home|the boat was late|
money was short|the door was locked|the old one had broken|the bridge had been washed away|
there was no time to lose|the neighbours had complained|the doctor had forbidden it|
the harvest had failed|a stranger had asked for it|the children were hungry|the light was failing|
the price had fallen|the rumour had spread|the letter had been misread|a promise had been made|
the tide was rising|the roof was leaking|winter was coming|the train had already left"""
VIRTUES = """patience courage honesty kindness hope silence wisdom friendship humour freedom trust
memory skill luck work rest fear anger pride greed envy doubt habit time truth beauty music hunger
sleep knowledge charity duty"""
SUBJECTS = """botany history geography music painting law medicine astronomy carpentry navigation
cooking chemistry poetry mathematics philosophy grammar drawing gardening printing weaving"""
ROOMS = """attic kitchen hall bedroom parlour pantry study nursery corridor staircase veranda cellar
loft"""
FURNITURE = """table shelf cupboard bench bed chair drawer desk stove window fireplace carpet"""
COLOURS = "red blue green yellow white black brown grey purple orange pink silver"
BUILDS = """wall fence roof boat shed bridge cart oven pond road gate mast stairway chimney dam
barrel"""
VISITORS = """traveller stranger neighbour cousin guest soldier pedlar inspector messenger pilgrim
photographer lawyer beggar"""
MATERIALS = "wood stone clay iron glass wool straw copper leather paper brick canvas cork wax"
DEEDS = """mend|carry|sell|hide|paint|clean|weigh|measure|draw|describe|wrap|lend|return|protect|
repair|examine|unpack|label|polish|remember"""
PASTS = """mended|carried|sold|hid|painted|cleaned|weighed|measured|drew|described|wrapped|lent|
returned|protected|repaired|examined|unpacked|labelled|polished|remembered"""


def people(split: str) -> list[str]:
    """Names of people of a split."""
    return f"{WOMEN[split]} {MEN[split]}".split()


def words(text: str) -> tuple[str, ...]:
    """The entries of one of the lists above, which are parted by `|` or by white space."""
    parts = text.split("|") if "|" in text else text.split()
    return tuple(" ".join(part.split()) for part in parts)
