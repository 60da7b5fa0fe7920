"""Four prompts of very different lengths, for a base model to continue."""

WORDS = "The best thing about a long train journey is"

PARAGRAPH = (
    "Bread needs only four things: flour, water, salt and time. Of these, time does most of the "
    "work. A dough that rests overnight in a cool place grows slowly, and while it grows, enzymes "
    "in the flour turn starch into sugar, which the yeast eats and the oven later browns. A dough "
    "that is hurried along with warmth and more yeast rises well enough, but it tastes of little. "
    "The second thing that a beginner learns is"
)

REPORT = """\
Minutes of the harbour council, the second of March

Present were the harbour master, the pilots' delegate, two members for the fishing boats, one for
the ferry company, and the town clerk, who wrote these minutes.

1. The dredging of the inner basin. The harbour master reported that the basin has lost forty
centimetres of depth since the last survey. The ferry touches the ground at spring low tides when
she is fully loaded. Two firms have made offers. The first would begin in April and finish in five
weeks, working at night, so that the fishing boats can leave in the morning. The second is a fifth
cheaper, but it can't begin before June, when the season is at its height. The members for the
fishing boats asked for the first. The member for the ferry company pointed out that a ferry which
can't sail at low tide costs more in a week than the difference between the offers. The council
voted for the first offer, with one vote against.

2. The light on the north mole. It has failed three times this winter, each time after heavy rain.
The electrician found water in the conduit under the walkway and says that the cable must be
replaced over its whole length. Until then a lamp with a battery has been set up, which the pilots
find too weak in fog. The pilots' delegate asked for a notice to shipping. The clerk will send it
tomorrow.

3. The gulls. The restaurant on the quay has written again about the gulls, which take food from
the tables and frighten the children. The harbour master has put up signs asking visitors not to
feed them. The visitors read the signs aloud to one another and feed the gulls all the same. A
member proposed a falconer, who comes twice a week to the market hall in the next town with good
success. The clerk will ask what he costs.

4. Berths for visitors. Last summer boats had to be turned away on thirty-one days. The council
discussed whether the disused coal pier could be opened to them. It has no water and no power, and
its ladders are rusted through, but its piles were inspected two years ago and found sound. The
harbour master thinks that a floating pontoon along its inner side would serve thirty boats.

5. Any other business. The member for the ferry company
"""

STORY = """\
The log of the lighthouse at Skarvey Head, kept by its last keeper

First of October. The boat brought me over at noon with six weeks of stores: flour, oats, dried
peas, two sides of bacon, tea, lamp oil enough for a winter, and a crate of books that the last
keeper had asked for and never came back to read. The boatman wouldn't stay for tea. He said that
the swell was getting up, and he was right, for by three o'clock there was white water all along
the landing. I carried everything up the hundred and twelve steps myself, and I counted them, as I
suppose every keeper has done on his first day. The lamp is in good order. Whoever had charge of
the brass cared for it. I lit it at ten minutes past six and sat with it until midnight.

Third of October. Wind from the north-west, fresh, with rain in bands. Four sails seen, all hull
down and standing to the south. I have found the workshop under the stairs. There is a lathe there,
driven by a treadle, and a rack of chisels in order of size, each with its name burnt into the
handle in small careful letters. On the bench lies a half-finished wooden bird. It is a storm
petrel, I think, with one wing still inside the block. I have left it as it was.

Seventh of October. Calm, and a fog so thick that I couldn't see the foot of the tower from the
door. I sounded the horn every two minutes from four in the morning until past noon. Towards eleven
something answered. It wasn't a ship's horn but a bell, struck twice and then, after a while, twice
again, somewhere to the west, where the chart shows nothing but rock. I answered it with the horn,
and it came no more. When the fog lifted there was nothing on the water at all, not a sail and not
a bird. I have written down the hour, as the regulations ask.

Twelfth of October. A gale since yesterday evening. The tower moves: not much, but a cup of water on
the table shows it. The first keeper built a shelf for his cups with a rail along its edge, and now
I know why. The spray reaches the gallery, forty metres up, and runs down the panes like rain. I
didn't sleep. At two in the morning a light showed to the south-west, low down, and burned for some
minutes, and I thought of a boat in distress, but it kept its place while everything around it
moved, and no boat could have done that in such a sea. I took its bearing: two hundred and fifty
degrees, the same as that of the bell.

Thirteenth of October. The gale is over. I have been through the old logs, which fill a whole wall
of the watch room, and looked for others who had seen or heard something on that bearing. It took
the day. There are nine entries in sixty years. Five are of the bell, three are of the light, and
one, by the second keeper, in the winter before he left, says only: two hundred and fifty degrees,
went to see, shall not write of it. The next page has been cut out, neatly, along a ruler. The page
after it is in another hand.

Fifteenth of October. Fine and cold. I took the dinghy round to the west side at slack water, which
I oughtn't to do alone. The rock there comes down to the sea in great steps, and on the lowest of
them, just above the weed, there is an iron ring, as thick as my wrist and worn bright on its inner
side. A ring doesn't stay bright in salt water. Something is made fast to it, and not seldom. Above
the ring there are marks cut into the stone, upright strokes in groups of five. I counted as far as
two hundred before the tide turned and I had to leave.

Eighteenth of October. Rain. I have finished the bird. I hadn't meant to, but I took it up to look
at the grain, and then there was a chisel in my hand, and when I next looked at the clock it was
time for the lamp. The second wing came out of the block as though it had been waiting there. I set
it on the sill of the watch room, facing west. It looks well there. I slept soundly for the first
time since I came.

Nineteenth of October. The bird is gone. The window was shut and latched, and the door at the foot
of the tower was barred from within, as I bar it every night. I have searched every floor. On the
sill, where it had stood, there was a little sea water, and in the water lay
"""

PROMPTS = (WORDS, PARAGRAPH, REPORT.rstrip("\n"), STORY.rstrip("\n"))
