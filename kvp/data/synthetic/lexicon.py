"""Words and templates of the generated text: written for kvp, plain English, no digits or hyphens.

Names of people and towns are split-specific, so that a sentence with a name belongs to one split;
common words are shared. Left out on purpose: every word of RULER's templates that matters there
("magic", "variable", "chain").

Templates are those of small stories whose steps follow from one another. A slot in braces is fixed
for the whole story (people, towns, what the story is about: `kvp.data.synthetic.text`) or drawn
afresh from the word list of its name; `{a x}` comes with its article; the first letter of a
sentence becomes a capital. Every step is a list of alternatives, at least one of them with a name
of a person or town.
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
_TEXTS = {
    "tail": """mere wick ford dale haven stead brook combe holt bury""",
    "job": """baker tailor sailor teacher farmer nurse carpenter gardener miller fisherman weaver
doctor singer clerk soldier hunter shepherd potter blacksmith cook printer mason glazier librarian
merchant ferryman beekeeper cobbler judge mayor student musician painter pilot plumber butcher""",
    "tool": """lantern key map letter compass basket rope hammer kettle notebook mirror whistle
knife bucket blanket ladder ring coin purse flute drum saw needle candle clock telescope umbrella
satchel box jar spade violin hat coat scarf boot bell ticket photograph wheel net brush hook chest
lamp parcel passport painting sword cup bowl""",
    "animal": """dog cat horse donkey goat sheep cow hen goose fox hare owl crow rabbit pony mule
duck sparrow badger otter mouse hedgehog squirrel heron pigeon lizard frog""",
    "spot": """market harbour mill bakery school library church bridge station orchard barn tower
garden forest inn workshop square well chapel farm river lighthouse quarry cellar theatre hospital
stable bathhouse meadow vineyard castle ferry dock museum bank kitchen courtyard""",
    "food": """bread cheese soup honey apples pears plums butter porridge cake stew beans rice
onions cabbage fish ham eggs jam nuts carrots mushrooms cherries pancakes potatoes salt pepper tea
milk cider""",
    "adj": """old small large heavy light bright dark quiet noisy broken clean dusty narrow wide
round crooked wooden iron copper silver golden plain painted empty full cheap costly rare common
strange useful lovely ugly smooth rough soft hard sharp blunt warm cold damp dry rusty polished
borrowed forgotten hidden familiar foreign ancient modern delicate sturdy simple clever odd faded
yellow green blue red white black grey brown purple pale""",
    "mood": """happy sad tired proud angry calm nervous hopeful lonely grateful curious bored
afraid cheerful worried patient jealous ashamed relieved surprised confident stubborn restless
doubtful""",
    "manner": """slowly quickly quietly carefully gladly proudly sadly gently firmly politely
bravely eagerly calmly secretly patiently suddenly warmly kindly nervously cheerfully silently
wearily""",
    "time": """in the morning|before noon|after lunch|in the evening|late at night|at dawn|
at sunset|on the next day|a week later|that same afternoon|when the bells rang|on market day|
in early spring|during the harvest|in the middle of winter|after the storm|before breakfast|
at the end of the day|on the first day of the month|as soon as the rain stopped|while the
others slept|some years ago|on a windy afternoon|just after midnight|at the beginning of
summer|between two showers""",
    "weather": """rain was falling|the sun was shining|snow covered the roofs|a cold wind blew|
fog lay over the fields|thunder rolled in the distance|the sky was clear|the clouds hung low|
the heat was hard to bear|frost had drawn flowers on the windows|a warm breeze came from the
south|the first leaves were falling|the moon was full|the air smelled of smoke|the streets
were wet|hail drummed on the tiles|the stars were out|mist rose from the water""",
    "reason": """the road was blocked|the shop had closed|nobody else was at home|the boat was
late|money was short|the door was locked|the old one had broken|the bridge had been washed
away|there was no time to lose|the neighbours had complained|the doctor had forbidden it|the
harvest had failed|a stranger had asked for it|the children were hungry|the light was failing|
the price had fallen|the rumour had spread|the letter had been misread|a promise had been made|
the tide was rising|the roof was leaking|winter was coming|the train had already left""",
    "virtue": """patience courage honesty kindness hope silence wisdom friendship humour freedom
trust memory skill luck work rest fear anger pride greed envy doubt habit time truth beauty music
hunger sleep knowledge charity duty""",
    "subject": """botany history geography music painting law medicine astronomy carpentry
navigation cooking chemistry poetry mathematics philosophy grammar drawing gardening printing
weaving""",
    "room": """attic kitchen hall bedroom parlour pantry study nursery corridor staircase veranda
cellar loft""",
    "furniture": """table shelf cupboard bench bed chair drawer desk stove window fireplace
carpet""",
    "colour": """red blue green yellow white black brown grey purple orange pink silver""",
    "build": """wall fence roof boat shed bridge cart oven pond road gate mast stairway chimney
dam barrel""",
    "visitor": """traveller stranger neighbour cousin guest soldier pedlar inspector messenger
pilgrim photographer lawyer beggar""",
    "material": """wood stone clay iron glass wool straw copper leather paper brick canvas cork
wax""",
    "deed": """mend|carry|sell|hide|paint|clean|weigh|measure|draw|describe|wrap|lend|
return|protect|repair|examine|unpack|label|polish|remember""",
    "past": """mended|carried|sold|hid|painted|cleaned|weighed|measured|drew|described|
wrapped|lent|returned|protected|repaired|examined|unpacked|labelled|polished|remembered""",
}
LISTS = {
    slot: tuple(" ".join(entry.split()) for entry in text.split("|" if "|" in text else None))
    for slot, text in _TEXTS.items()
}
"""Words by what they are, those of prose by their slots."""


def people(split: str) -> list[str]:
    """Names of people of a split."""
    return f"{WOMEN[split]} {MEN[split]}".split()


Step = tuple[str, ...]
"""Alternatives of which one is written."""


def _steps(text: str) -> tuple[Step, ...]:
    """Steps are parted by blank lines, alternatives by line breaks."""
    return tuple(tuple(step.splitlines()) for step in text.strip().split("\n\n"))


(OPENINGS,) = _steps("""
{hero} lived in {town}, where {he} worked as {a job} and kept {a adj} {beast}.
{time}, {hero} left {town} with nothing but {a adj} {tool} and some {food}.
Everyone in {town} knew {hero}, the {job} with the {adj} {tool}.
There was once {a job} called {hero}, who owned {a adj} house near the {spot} of {town}.
{hero} had been {a job} in {town} for most of {his} life.
The {job} of {town} was {a mood} person named {hero}.
{time}, while {weather}, {hero} came to {town} in search of work as {a job}.
In {town}, not far from the {spot}, {hero} and {pal} shared a house of {material}.
{hero} and {pal} had been friends since they went to school in {town}.
When {hero} was young, {pal} taught {him} {subject} at the {spot} in {town}.
""")
LOST = _steps("""
{time}, {hero} noticed that the {tool} was missing from the {furniture}.
{hero} reached for the {tool}, but the {furniture} was empty.
The {tool} that {pal} had given {him} was gone.
{time}, {hero} lost the {tool} somewhere between the {spot} and the {spot2}.

{he} searched the {room} and looked under the {furniture}, but found only {a adj} {noun}.
First {he} looked in the {room}, then behind the {furniture}, and then in the {spot2}.
"Have you seen my {tool}?" {hero} asked the {job2} at the {spot2}.
{hero} asked {pal} for help, because {reason}.
The {job2} had seen nothing, since {reason}.

"Where did you have it last?" {pal} asked {manner}.
"I had it at the {spot}, when {weather}," said {hero}.
{pal} remembered that {hero} had put the {tool} next to the {noun} at the {spot}.
Then {hero} remembered the {visitor}, who had sat by the {furniture} {time}.

So they walked back to the {spot}, although {weather}.
{hero} hurried to the {spot}, where the {beast} was digging in the {material}.
They went to the {spot} together and lifted every {noun}.
At the {spot}, {a adj} {noun} stood exactly where it had always stood.

There lay the {tool}, {adj} but whole, under the {furniture}.
The {beast} had carried the {tool} to the {spot} and buried it beside the {noun}.
{pal} found the {tool} inside {a adj} {noun} and gave it back to {hero}.
The {tool} was in the hands of the {visitor}, who had taken it by mistake.

{hero} was so {mood} that {he} gave {pal} some {food}.
From then on {hero} kept the {tool} in the {room}, tied to the {furniture}.
Since that day {hero} has never left {town} without the {tool}.
"Next time, tie it to your {beast}," said {pal}, and both of them laughed.
""")
VISIT = _steps("""
{time}, {a visitor} knocked at the door of the {spot} and asked for {hero}.
{a visitor} arrived in {town} {time}, carrying {a adj} {tool}.
{time}, {hero} met {a visitor} who was looking for the {spot}.

"I have come from far away, because {reason}," said the {visitor} to {hero}.
The {visitor} told {hero} that {reason} and that only {a job2} could help.
The {visitor} showed {hero} the {tool} and asked {him} to {deed} it.
The {visitor} was {mood} and ate the {food} without a word.

{hero} listened {manner}, for {he} had never heard of such a thing in {town}.
{hero} did not trust the {visitor}, because the {tool} looked {adj}.
At first {hero} was {mood}, but {pal} reminded {him} of an old promise.
{hero} offered the {visitor} a bed in the {room} and a plate of {food}.

During the night {weather}, and the {beast} would not stop barking at the {visitor}.
{time}, {hero} saw the {visitor} at the {spot} with {a adj} {noun}.
{pal} followed the {visitor} to the {spot} and hid behind the {furniture}.
While {weather}, {pal} opened the {tool} and found a note inside.

It turned out that the {visitor} was the {job2} who had once saved {pal} from drowning.
The {visitor} had only wanted to {deed} the {noun} that belonged to the {spot}.
In the end the {visitor} confessed that the {tool} was stolen from {a job2}.
The {visitor} thanked {hero} and left {him} the {tool} as a present.

{hero} still tells this story at the {spot} whenever {weather}.
Nobody in {town} ever saw the {visitor} again, but {hero} kept the {noun}.
{pal} said that {virtue} was worth more than {virtue2}, and {hero} agreed.
""")
BUILD = _steps("""
{time}, {hero} decided to build a new {build} beside the {spot}.
The {build} of the {spot} had fallen down, because {reason}.
The people of {town} needed {a build}, and {hero} was asked to plan it.

{he} bought {material} and {material2} from the {job2}, who wanted {food} in return.
{hero} measured the ground with {a tool} while {pal} wrote everything down.
{pal} brought the {material}, and the {beast} pulled the cart.
There was enough {material}, but no {material2} could be found in {town}.

The work went {manner}, although {weather}.
After three days the {build} was half done, but then {pal} fell ill.
{hero} worked {manner} until {weather} and nobody could see the {noun} any more.
The {job2} laughed at the {adj} {build} and called it a waste of {material}.

Because {reason}, {hero} had to use {material2} instead of {material}.
{time}, the {build} broke, and {hero} had to begin again.
"If we give up now, {town} will have no {build} in winter," said {pal}.
The {visitor} offered to help, but asked for the {tool} as payment.

When the {build} was finished, {hero} painted it {colour}.
At last the {build} stood firm, {colour} and {adj}, next to the {spot}.
{time}, the whole of {town} came to see the {build} that {hero} had made.

The {beast} was the first to cross it, and {pal} the second.
{hero} cut a small {noun} into the {material}, so that people would remember {pal}.
The {build} still stands in {town}, and it is still {colour}.
""")
JOURNEY = _steps("""
{time}, {hero} set out from {town} to visit {pal}, who lived beyond the {spot}.
{hero} packed {food}, {a noun} and the {tool}, and set off for the {spot}.
{pal} had written that {reason}, so {hero} took the road to {town2}.

On the way {he} met {a job2} who was leading {a adj} {beast}.
After some hours {he} reached the {spot}, where {weather}.
The road from {town} to {town2} was {adj} and full of holes.
{hero} slept under the {noun} of the {job2} and dreamed of {food}.

"Turn left at the {spot}, and keep the {colour} house on your right," said the {job2}.
At the crossing {hero} asked {a adj} {job2} for the way to {town2}.
The {beast} refused to go on, because {weather}.
{hero} traded the {tool} for a place on the cart of the {job2}.

Near {town2} the wheel broke, and {hero} had to walk the rest of the way.
{he} was {mood} when {he} saw the lights of {town2}, for {reason}.
When {hero} arrived in {town2}, {pal} was waiting at the {spot} with {food}.

They talked about {subject} and {virtue} until {weather}.
{pal} showed {hero} the {spot} of {town2} and the {adj} {build} beside it.
{hero} stayed in {town2} for a month and learned {subject} from {a job2}.

{hero} returned to {town} {time}, {mood} and with {a adj} {noun} for the {beast}.
On the way back to {town}, {hero} gave the {tool} to the {job2}.
Ever since, {hero} and {pal} meet at the {spot} of {town2} once a year.
""")
QUARREL = _steps("""
{hero} and {pal} quarrelled about the {tool}, which both of them had paid for.
{time}, {pal} accused {hero} of having broken the {tool}.
{hero} wanted to sell the {tool}, but {pal} wanted to {deed} it.

"It was {adj} when I lent it to you," said {pal} {manner}.
"I never touched it," answered {hero} {manner}, because {reason}.
{pal} took the {tool} to the {spot} and locked it in the {room}.
They did not speak for a week, and the {beast} was {mood}.

The {job2} of {town} was asked to judge the matter and sat down on {a noun}.
{time}, they went to the {job2}, who was known for {virtue}.
{a visitor} heard of the quarrel and proposed to weigh the {tool} against {food}.

"Let {hero} have the {tool} in summer and {pal} in winter," said the {job2}.
The {job2} asked both of them to describe the {tool}, and only {hero} knew it was {adj}.
The {job2} found that the {beast} had knocked the {tool} from the {furniture}.

{hero} was {mood}, yet {he} offered {pal} {his} hand.
So the {tool} stayed at the {spot}, where anyone could use it.
{pal} laughed first, and then {hero} had to laugh as well.
Later they bought a second {tool}, which was {colour} and much more {adj}.
""")
(ASIDES,) = _steps("""
{weather}, and the {adj} {noun} near the {spot2} could hardly be seen.
The {room} smelled of {food} and {material}.
{hero} thought of {virtue} and of the {adj} {noun} in {his} {room}.
{a colour} {noun} stood on the {furniture} beside {a adj} {noun2}.
Nothing in the {room} was {adj} except the {noun}.
"{virtue} is better than {virtue2}," {pal} used to say.
{a job2} needs {virtue}, but {a job3} needs {virtue2} as well.
{hero} {past} the {noun} {manner} and put it on the {furniture}.
{pal}, who liked {subject}, {past} {a adj} {noun} for the {job2}.
Whoever has {a noun} and some {food} can wait until {weather}.
If {reason}, {a job2} must {deed} the {noun} before nightfall.
Although {reason}, the {job2} {past} every {noun} in the {spot2}.
The {beast} slept on {a noun} in the {room} and dreamed of {food}.
Most people in {town} eat {food} {time}, and some eat {food2}.
In {town} {a noun} costs more than {a adj} {noun2}, because {reason}.
The {animal} and the {animal2} drank from the same {noun} while {weather}.
It is easier to {deed} {a adj} {noun} than to {deed2} {a adj} {noun2}.
Neither the {job2} nor the {job3} knew how to {deed} the {noun}.
The {job2} was {mood}, the {job3} was {mood2}, and only the {animal} ate its {food}.
How {adj} the {noun} looked while {weather}!
What would {a mood} {job2} do with {a adj} {noun}?
{hero} counted the {noun} by the {furniture} and wrote to {pal} about it.
There were {food} and {food2} on the {furniture}, but {pal} wanted neither.
{time}, the {spot2} of {town} was full of people who wanted {food}.
Every {noun} in the {spot2} was made of {material} or of {material2}.
""")
PLOTS = (LOST, VISIT, BUILD, JOURNEY, QUARREL)
