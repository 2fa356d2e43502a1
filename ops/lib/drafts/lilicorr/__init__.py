"""LiLiCorr (NVIDIA, arXiv 2608.20530): a walk over the best candidates of every slot, scored by a small transformer.

The candidates of all slots are the nodes of a lattice. A bidirectional transformer over all nodes gives each a vector
for what follows it and one for what it follows; a candidate is scored by the cosine of its vector and the chosen
predecessor's. The convolutions of DFlash2 may go around the backbone's sublayers. Sources: the paper, ModelOpt's pull
request 2342 (training), SGLang's and vLLM's LiLiCorrDraftModel.
"""
