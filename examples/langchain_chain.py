# %% [markdown]
# # LangChain: a chain and an agent
#
# Documents of `LazyRAGVectorStore` are chunks of the runtime. Wherever their text stands verbatim in a message, its
# keys and values come from the cache: in a chain as LangChain's pages write it, in the chain of this package, and in
# what a tool returns to an agent. The model of this page is a very small one, and answers accordingly.

# %%
from langchain_core.documents import Document
from langchain_lazy_rag import ChatLazyRAG, LazyRAGVectorStore, create_lazy_rag_chain

from lazy_rag import Runtime

rt = Runtime.shared("smollm2-135m", progress=False)
docs = [
    Document(id="opening", page_content="The museum of Harlow opens at ten. On Mondays it is closed."),
    Document(id="tickets", page_content="A ticket for the museum of Harlow costs 9 euros for an adult."),
    Document(id="whale", page_content="The whale in the great hall is 18 metres long. It was found in 1904."),
]
store = LazyRAGVectorStore.from_documents(docs, rt.embeddings, runtime=rt, encode="now")
llm = ChatLazyRAG(runtime=rt, temperature=0, max_tokens=32, stop=["\n"])


def cached(message):
    used = message.usage_metadata["input_token_details"]
    return f"{used['cache_read']} of {message.usage_metadata['input_tokens']} prompt tokens from the cache"


# %% [markdown]
# ## An existing chain, with only the model replaced

# %%
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

prompt = ChatPromptTemplate.from_template(
    "Answer the question based only on the following context:\n\n{context}\n\nQuestion: {question}"
)


def format_docs(documents):
    return "\n\n".join(document.page_content for document in documents)


retriever = store.as_retriever(search_kwargs={"k": 1})
chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm

message = chain.invoke("How long is the whale?")
print(message.text.strip(), "|", cached(message))
assert message.usage_metadata["input_token_details"]["cache_read"] > 20
assert message.usage_metadata["input_token_details"]["cache_creation"] == 0

# %% [markdown]
# What came from where, chunk by chunk (the first one is the opening of the chat template):

# %%
message.response_metadata["chunks"]

# %% [markdown]
# ## The chain of this package
#
# It has the keys of `create_retrieval_chain` and hands documents on by their ids. Its prompt is that of `rt.query`.

# %%
rag = create_lazy_rag_chain(llm, retriever)
for part in rag.stream({"input": "How many euros does a ticket cost?"}):
    print(part.get("answer", ""), end="")

# %%
rt.last_answer

# %% [markdown]
# ## Structured output
#
# A grammar holds the answer to its schema, whatever the model.

# %%
from typing import Literal

from pydantic import BaseModel


class Price(BaseModel):
    visitor: Literal["adult", "child"]
    euros: int


question = f"{docs[1].page_content}\n\nHow many euros does an adult pay?"
price = ChatLazyRAG(runtime=rt, temperature=0, max_tokens=40).with_structured_output(Price).invoke(question)
assert isinstance(price, Price)
price

# %% [markdown]
# ## An agent's tool
#
# The documented retrieval tool returns text and documents. Their text comes back in a `ToolMessage`, and from the
# cache. A model of 135 million parameters has to be told to call the tool; larger ones decide (`tool_choice="auto"`).

# %%
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool


@tool(response_format="content_and_artifact")
def retrieve(topic: Literal["opening hours", "tickets", "whale"]):
    """Find pages about the museum."""
    found = store.similarity_search(topic, k=1)
    return format_docs(found), found


messages = [HumanMessage("How long is the whale in the museum?")]
forced = llm.bind_tools([retrieve], tool_choice="retrieve", parallel_tool_calls=False).bind(max_tokens=60, stop=[])
messages.append(forced.invoke(messages))
call = messages[-1].tool_calls[0]
print(call["name"], call["args"])
messages.append(retrieve.invoke(call))
answer = llm.bind_tools([retrieve], tool_choice="none").invoke(messages)
print(answer.text.strip(), "|", cached(answer))
assert answer.usage_metadata["input_token_details"]["cache_read"] > 0

# %% [markdown]
# ## An agent that always retrieves
#
# `LazyRAGMiddleware` searches for every user message and has the model read it behind its documents, as chunks. The
# state keeps the messages as they were written; the documents are in `context`. The second turn finds the first one in
# the cache, documents and all.

# %%
from langchain.agents import create_agent
from langchain_lazy_rag import LazyRAGMiddleware
from langgraph.checkpoint.memory import InMemorySaver

agent = create_agent(llm, tools=[], middleware=[LazyRAGMiddleware(retriever)], checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "visitor"}}
for question in ("When is the museum closed?", "How many euros does a ticket cost?"):
    state = agent.invoke({"messages": [("user", question)]}, thread)
    message = state["messages"][-1]
    print(question, "|", state["context"][0].id, "|", message.text.strip(), "|", cached(message))
assert [document.id for document in state["context"]] == ["tickets"]
assert message.usage_metadata["input_token_details"]["cache_creation"] == 0

# %%
rt.close()
