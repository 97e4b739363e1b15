# %% [markdown]
# # LlamaIndex: swap the LLM in an existing application
#
# The application below is LlamaIndex's starter: documents, a `VectorStoreIndex`, a query engine. One line makes it use
# lazy-rag for the language model, the embeddings and the token counts. Everything else stays as it is.

# %%
from llama_index.llms.lazy_rag import use_in_llama_index

from lazy_rag import Runtime

rt = Runtime.shared("smollm2-135m", progress=False)
llm = use_in_llama_index(rt, max_tokens=32, temperature=0.0)

# %% [markdown]
# The application.

# %%
from llama_index.core import Document, VectorStoreIndex

documents = [
    Document(text="The lighthouse of Gull Point was built in 1871. It is 42 metres high.", metadata={"file": "a.txt"}),
    Document(text="The keeper of the lighthouse is Martha Ellison, since 1998.", metadata={"file": "b.txt"}),
    Document(text="The ferry to Gull Point leaves Port Marrow at 9:15 and at 14:40.", metadata={"file": "c.txt"}),
]
index = VectorStoreIndex.from_documents(documents)
engine = index.as_query_engine(similarity_top_k=3)
print(engine.query("How high is the lighthouse?"))

# %% [markdown]
# What came from the cache? LlamaIndex made the prompt, and the texts of its nodes were found in it verbatim. Each was
# computed once, while this query ran.

# %%
print(rt.last_answer.receipt)

# %% [markdown]
# The next question finds all of them, though the prompt is another one. Metadata ("file: a.txt") and the template are
# ordinary text around them.

# %%
print(engine.query("Who keeps the lighthouse?"))
print(rt.last_answer.receipt)

# %% [markdown]
# The same holds for the other response modes and for chat engines, for streams and for async code.

# %%
chat = index.as_chat_engine(chat_mode="context", similarity_top_k=3)
print(chat.chat("When does the ferry leave?"))
print(rt.last_answer.receipt)

# %% [markdown]
# Counts are in every response: `cached_tokens` beside the usual ones.

# %%
llm.complete("Say hello.").raw["usage"]
