# %% [markdown]
# # LlamaIndex: nodes stay nodes
#
# With `LazyRAGSynthesizer` the nodes that a retriever found reach the runtime as what they are: no text is joined,
# searched for or tokenised again. `LazyRAGVectorStore` keeps texts, vectors and KV of an index in one place.

# %%
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.llms.lazy_rag import LazyRAGPrefill, LazyRAGSynthesizer, LazyRAGVectorStore, use_in_llama_index

from lazy_rag import Runtime

rt = Runtime.shared("smollm2-135m", progress=False)
llm = use_in_llama_index(rt, max_tokens=32, temperature=0.0)

# %% [markdown]
# An index over the runtime. `LazyRAGPrefill` computes the KV while documents are ingested, so that even the first
# question finds it.

# %%
documents = [
    Document(text="The lighthouse of Gull Point was built in 1871. It is 42 metres high.", metadata={"year": 1871}),
    Document(text="The keeper of the lighthouse is Martha Ellison, since 1998.", metadata={"year": 1998}),
    Document(text="The ferry to Gull Point leaves Port Marrow at 9:15 and at 14:40.", metadata={"year": 2024}),
]
store = LazyRAGVectorStore(rt)
index = VectorStoreIndex.from_documents(
    documents,
    storage_context=StorageContext.from_defaults(vector_store=store),
    transformations=[*Settings.transformations, LazyRAGPrefill(rt)],
)

# %% [markdown]
# The synthesizer is the only thing that differs from the stock engine.

# %%
engine = index.as_query_engine(similarity_top_k=3, response_synthesizer=LazyRAGSynthesizer())
print(engine.query("How high is the lighthouse?"))
print(rt.last_answer.receipt)

# %% [markdown]
# The prompt as it was laid out: nodes in the retriever's order, live text around them.

# %%
rt.last_answer.layout

# %% [markdown]
# Filters hold before the best nodes are chosen.

# %%
recent = MetadataFilters(filters=[MetadataFilter(key="year", operator=">", value=1900)])
[node.node.text for node in index.as_retriever(similarity_top_k=2, filters=recent).retrieve("lighthouse")]

# %% [markdown]
# Deleting a document takes its vector, its text and its KV.

# %%
index.delete_ref_doc(documents[2].doc_id)
len(store.get_nodes())

# %% [markdown]
# Answers can be objects of a class. A grammar makes sure that they are valid, whatever the model is.

# %%
from pydantic import BaseModel, Field


class Lighthouse(BaseModel):
    name: str = Field(max_length=40)
    height_in_metres: int


structured = index.as_query_engine(response_synthesizer=LazyRAGSynthesizer(output_cls=Lighthouse))
structured.query("Describe the lighthouse.").response
