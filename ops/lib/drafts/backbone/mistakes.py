from ops.lib.drafts.backbone.contract import of_import  # noqa: F401
