"""DFlash2 (inco.ai, z-lab): convolutions around every sublayer, and a walk over the best candidates of every slot.

A convolution adds the slots before to a slot, with fixed kernels and kernels made of the slot. The selector scores a
candidate by its logit and by how well it follows the token that was chosen before it. The training objective is not
public: see loss.py. Sources: z-lab's reference implementation, SGLang's DFlash2DraftModel.
"""
