# %% [markdown]
# # Chat over a folder that changes
#
# Documents are known by their path. Adding the folder again embeds and computes only what changed; what is deleted is
# gone from the index, the texts and the cache.

# %%
import tempfile
from pathlib import Path

from lazy_rag import Runtime, SamplingParams

rt = Runtime.shared("smollm2-135m", progress=False)
greedy = SamplingParams(temperature=0, max_tokens=32, stop="\n")

folder = Path(tempfile.mkdtemp())
(folder / "hours.md").write_text("The library opens at nine in the morning and closes at six in the evening.")
(folder / "rules.md").write_text("You can borrow five books for three weeks. A late book costs one crown a day.")
(folder / "staff.md").write_text("The head of the library is Ines Valdez. Her office is on the second floor.")

rt.add_documents(folder)
print(rt.stats.documents, "documents,", rt.stats.tokens_encoded, "tokens encoded so far")

# %% [markdown]
# A small chat loop: retrieve for each question, and hand the earlier turns on as history.

# %%
history = []


def ask(question):
    answer = rt.query(question, k=2, history=history, sampling=greedy)
    history.extend([{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}])
    print(f"{question}\n  {answer.text.strip()}\n  {answer.receipt.reuse:.0%} of the chunk tokens came from the cache")
    return answer


ask("When does the library open?")
answer = ask("Who is the head of the library?")

# %% [markdown]
# One file changes. The folder is added again: one chunk is new, the others are recognised by their content.

# %%
(folder / "hours.md").write_text("The library opens at eleven in the morning and closes at eight in the evening.")
before = rt.stats.tokens_encoded
rt.add_documents(folder)
print(rt.stats.documents, "documents,", rt.stats.tokens_encoded - before, "tokens encoded for the change")

history.clear()
answer = ask("When does the library open?")
assert "nine" not in " ".join(source.text for source in answer.sources)

# %% [markdown]
# One file is deleted. Its id is its path.

# %%
rt.delete([str((folder / "staff.md").resolve())])
print([source.metadata["file_name"] for source in rt.find()])
answer = rt.query("Who is the head of the library?", k=5, sampling=greedy)
assert "Valdez" not in " ".join(source.text for source in answer.sources)

# %% [markdown]
# A saved store opens with everything in it: nothing is embedded or encoded again.

# %%
store = folder / "store"
rt.save(store)
rt.close()
with Runtime.load(store, progress=False) as again:
    answer = again.query("How many books can I borrow?", k=1, sampling=greedy)
    print(answer.text.strip())
    print("found in:", [use.tier for use in answer.receipt.chunks], "encoded:", answer.receipt.tokens_encoded)
    assert answer.receipt.tokens_encoded == 0
